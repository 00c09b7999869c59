// The work of each stream of each device over the whole window, and the readings of gauges.

const device = columnsOf(report.device, ["start", "length", "lane", "name", "span", "label"], ["start", "span"]);
const DEVICE_COLOURS = ["own-1", "layer", "own-3", "comm", "own-5", "copy", "own-2", "step", "loader", "own-4"];

/** The indices of each span's device intervals, by the number of the span. */
const stretchesOf = new Map();
for (let at = 0; at < device.start.length; at++) if (device.span[at] >= 0) push(stretchesOf, device.span[at], at);

function intervalBar(at, zero) {
  const start = device.start[at] - zero, name = report.device.names[device.name[at]];
  return { start, end: start + device.length[at], colour: DEVICE_COLOURS[device.name[at] % DEVICE_COLOURS.length], text: name, interval: at };
}

/** Return the lanes of streams that worked for some spans. */
function deviceLanesOf(bars, zero) {
  const lanes = new Map();
  for (const span of bars.keys()) for (const at of stretchesOf.get(span) ?? []) push(lanes, device.lane[at], intervalBar(at, zero));
  return [...lanes].sort((a, b) => a[0] - b[0]).map(([lane, its]) => ({ label: report.device.lanes[lane], bars: its }));
}

function tellInterval(bar, facts) {
  const at = bar.interval, label = device.label[at];
  facts.push(["on", report.device.lanes[device.lane[at]]]);
  if (label >= 0) facts.push(["label", report.device.labels[label]]);
  if (device.span[at] >= 0) facts.push(["span", siteLabel(spans.site[device.span[at]])]);
  return [bar.text, facts];
}

function startDevices() {
  const box = byId("device-lanes");
  if (!device.start.length) {
    box.append(element("p", { class: "empty" }, report.device.why || "No device time was recorded."));
  } else {
    const lanes = report.device.lanes.map((label) => ({ label, bars: [] }));
    for (let at = 0; at < device.start.length; at++) lanes[device.lane[at]].bars.push(intervalBar(at, 0));
    let until = report.about.window_ns;
    for (let at = 0; at < device.start.length; at++) until = Math.max(until, device.start[at] + device.length[at]);
    const describe = (bar) => tellInterval(bar, [["at", timeText(bar.start)], ["took", timeText(bar.end - bar.start)]]);
    const { chart, tools, detail } = searchableChart({ label: "What devices did", lanes, length: until, describe }, "Find a kernel or span", "stretch");
    box.append(tools, chart.node, legendOfNames(), detail);
    chart.resize();
  }
  startGauges();
}

/** The names with most device time and their colours. */
function legendOfNames() {
  const sums = new Float64Array(report.device.names.length);
  for (let at = 0; at < device.start.length; at++) sums[device.name[at]] += device.length[at];
  const most = [...sums.keys()].filter((name) => sums[name] > 0).sort((a, b) => sums[b] - sums[a]).slice(0, DEVICE_COLOURS.length);
  return element("div", { class: "legend" }, ...most.map((name) => element("span", {}, swatch(DEVICE_COLOURS[name % DEVICE_COLOURS.length]), report.device.names[name])));
}

const SIZES = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

function gaugeText(value, unitOf) {
  if (unitOf === "bytes" || unitOf === "bytes/s") {
    const [name, scale] = SIZES.find(([, size]) => Math.abs(value) >= size) ?? ["B", 1];
    return `${compact(value / scale)} ${name}${unitOf === "bytes/s" ? "/s" : ""}`;
  }
  return unitOf === "%" ? `${compact(value)}%` : `${compact(value)} ${unitOf}`;
}

/** Return a line chart for each gauge with several readings. */
function startGauges() {
  const gauges = report.device.gauges.filter((gauge) => gauge.values.length > 1);
  for (const gauge of gauges) gauge.at = summedNumbersOf(gauge.at);
  const box = byId("gauges");
  for (const of of new Set(gauges.map((gauge) => gauge.of))) {
    const grid = element("div", { class: "gauges" });
    for (const gauge of gauges.filter((one) => one.of === of)) {
      const x = d3.scaleLinear([0, Math.max(report.about.window_ns, gauge.at[gauge.at.length - 1], 1)], [0, 100]);
      const most = gauge.values.reduce((a, b) => Math.max(a, b)), least = Math.min(0, gauge.values.reduce((a, b) => Math.min(a, b)));
      const y = d3.scaleLinear([least, most > least ? most : least + 1], [54, 2]);
      const line = d3.line((_, at) => x(gauge.at[at]), (value) => y(value));
      const picture = d3.create("svg").attr("viewBox", "0 0 100 56").attr("preserveAspectRatio", "none").attr("aria-hidden", "true");
      picture.append("line").attr("x1", 0).attr("x2", 100).attr("y1", 55.5).attr("y2", 55.5).attr("stroke", "var(--line)").attr("vector-effect", "non-scaling-stroke");
      picture.append("path").attr("d", line(gauge.values));
      const svg = picture.node();
      svg.addEventListener("pointermove", (event) => {
        const edges = svg.getBoundingClientRect(), at = d3.bisectCenter(gauge.at, x.invert((100 * (event.clientX - edges.left)) / edges.width));
        showTip([gauge.name, [["at", timeText(gauge.at[at])], ["reads", gaugeText(gauge.values[at], gauge.unit)], ["", gauge.about]]], event.clientX, event.clientY);
      });
      svg.addEventListener("pointerleave", hideTip);
      grid.append(element("div", { class: "gauge", role: "group", "aria-label": `${gauge.name}, at most ${gaugeText(most, gauge.unit)}` },
        element("div", { class: "name" }, element("span", {}, gauge.name), element("span", { class: "muted" }, `max ${gaugeText(most, gauge.unit)}`)), svg));
    }
    box.append(element("h3", {}, `Gauges of ${of}`), grid);
  }
}

// The page: its head, its summary, notes on omitted data, and each section.

function startSummary() {
  const { about } = report;
  byId("service").textContent = about.service || "Trace";
  const origin = [about.header, about.host && `host ${about.host}`, about.pid > 0 && !about.header && `process ${about.pid}`,
    about.began && `began ${about.began}`, `window ${about.window}`, counted(about.spans, "span"), about.recorder && `${about.recorder} recorder`];
  byId("origin").textContent = origin.filter(Boolean).join(" · ");
  byId("origin").title = byId("origin").textContent;
  if (about.died) {
    byId("died").hidden = false;
    byId("died").textContent = about.died;
  }
  byId("headlines").append(...report.headlines.map((text) => element("li", {}, text)));
  for (const { label, value, note, mood } of report.figures) {
    byId("figures").append(element("div", { class: mood || null }, element("dt", {}, label), element("dd", { class: "value" }, value),
      element("dd", { class: "note", title: note }, note)));
  }
  for (const endpoint of report.endpoints) byId("endpoints").append(endpointNode(endpoint));
  byId("text").textContent = report.text;
  const left = report.left_out.length ? report.left_out : ["Nothing: all spans, and all rows of all tables, are in this page."];
  byId("left-out").append(...left.map((one) => element("li", {}, one)));
  byId("instrumentation").textContent = report.instrumentation.join("\n") || "The trace does not say it.";
}

/** Return an endpoint with the parts of its requests' wall time. */
function endpointNode({ name, requests, times, parts }) {
  const list = element("ul", { class: "parts" });
  for (const [part, , share, mean] of parts) {
    list.append(element("li", {}, swatch(partColour(part)), element("span", { class: "n", title: part }, part),
      element("span", { class: "v" }, mean), element("span", { class: "r" }, share)));
  }
  const [mean, p50, p99] = times;
  return element("div", { class: "endpoint" },
    element("header", {}, element("b", {}, name),
      element("span", { class: "muted" }, `${requests} requests · mean ${mean} ${unit} · p50 ${p50} · p99 ${p99}`)),
    stack(parts.map(([part, ratio, share]) => [part, ratio, share])), list);
}

startSummary();
startRequests();
startCalls();
startDevices();
startViews();
document.documentElement.dataset.ready = "true";
