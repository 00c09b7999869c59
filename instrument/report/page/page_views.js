// The list of requests, and the selected request: its parts, and its spans in all processes and batches.

const MOST_LANES = 120;
const SPAN_ROWS = 2000;
const SHARE = "share of batches", WAITING = "waiting in batches";

const listed = columnsOf(report.listed, ["site", "start", "wall", "span", "has_spans", "part_count", "part", "part_ns"], ["start"]);
const spans = columnsOf(report.spans, ["start", "length", "children", "site", "parent", "request", "lane"], ["start"]);
const turns = columnsOf(report.turns, ["count", "part", "span", "after", "length"]);
const pairs = columnsOf(report.pairs, ["count", "span", "given", "size"], ["span"]);
const partBegins = beginsOf(listed.part_count), turnBegins = beginsOf(turns.count), pairBegins = beginsOf(pairs.count);

const siteName = (site) => report.sites[site][0];
const siteLabel = (site) => (report.sites[site][2] ? `${report.sites[site][0]} (${report.sites[site][2]})` : report.sites[site][0]);
const siteKind = (site) => report.sites[site][1];

const lanes = columnsOf(report.lanes, ["thread", "task"]);
const laneLabel = (lane) => report.lanes.threads[lanes.thread[lane]] + (lanes.task[lane] ? `, task ${lanes.task[lane]}` : "");
const errorsOf = ({ error }) => (row) => (row in error ? report.errors[error[row]] || "error" : "");
const errorOf = errorsOf(report.listed), errorOfSpan = errorsOf(report.spans);
const selfOf = (span) => spans.length[span] - spans.children[span];

const numbersOfSpans = d3.range(spans.start.length);
/** The numbers of each span's children, by the span's number. */
const below = d3.group(numbersOfSpans.filter((at) => spans.parent[at]), (at) => at - spans.parent[at]);
/** The spans of each listed request, in all processes. */
const spansOfRequest = d3.group(numbersOfSpans, (at) => spans.request[at]);

/** Return the parts of a request as `[name, share, text, ns]`, in their usual order. */
function partsOf(request) {
  const wall = listed.wall[request];
  const inOrder = d3.range(partBegins[request], partBegins[request + 1]).sort((a, b) => listed.part[a] - listed.part[b]);
  return inOrder.map((at) => [report.listed.part_names[listed.part[at]], listed.part_ns[at] / (wall || 1), shareText(listed.part_ns[at], wall), listed.part_ns[at]]);
}

/** Return the part that took most of a request's time. */
const heaviestPart = (request) => partsOf(request).reduce((a, b) => (b[3] > a[3] ? b : a), ["", 0, "", -1])[0];

const WHAT = { request: "Requests", step: "Steps", span: "Topmost spans" };

function startRequests() {
  const count = listed.site.length, { what } = report;
  byId("requests-title").textContent = byId("requests-link").textContent = count ? WHAT[what] : "Requests";
  if (!count) {
    byId("request-search").closest(".tools").remove();
    byId("request-list").append(element("p", { class: "empty" },
      "No span is in this trace, so there is no request to show. A request is what a rule with `kind: request` names in the profile, or what `requests: auto` finds at the server; see also what was not observed, at the end of the page."));
    return;
  }
  if (what !== "request") {
    byId("requests-title").after(element("p", { class: "note" },
      `No request was recorded: these are the ${what === "step" ? "steps" : "topmost spans"}. A rule with \`kind: request\`, or \`requests: auto\`, makes requests of them, with the parts of their time.`));
  }
  const keys = report.listed.keys, hasKeys = Object.keys(keys).length > 0, hasParts = listed.part_count.length > 0;
  const keyOf = (row) => (keys[row] ?? []).join(" ");
  const columns = [
    textColumn(what === "request" ? "Endpoint" : "Name", (row) => siteName(listed.site[row])),
    hasKeys && textColumn("Key", keyOf),
    timeColumn("Began", (row) => listed.start[row]),
    timeColumn("Wall", (row) => listed.wall[row]),
    hasParts && { label: "Parts", kind: "text", value: heaviestPart, text: () => "", node: (row) => stack(partsOf(row), "small") },
    Object.keys(report.listed.error).length > 0 && textColumn("Error", errorOf),
    textColumn("Span", (row) => report.listed.ids[row]),
  ].filter(Boolean);
  const table = new SortableTable({ label: WHAT[what], columns, count, tall: true, pick: showLife });
  table.sortBy(columns.findIndex((one) => one.label === "Wall"));
  byId("request-list").append(table.node);
  if (report.about.cut) byId("request-list").append(element("p", { class: "note" }, `At an edge of what is held, and so in no number of the summary or a table: ${counted(report.about.cut, "request")} of the list.`));
  const search = byId("request-search");
  search.placeholder = hasKeys ? "Endpoint, key, error or span" : "Name, error or span";
  const haystack = Array.from({ length: count }, (_, row) =>
    [siteName(listed.site[row]), keyOf(row), errorOf(row), report.listed.ids[row], report.listed.traces[row] ?? ""].join("\n").toLowerCase());
  const describe = () => {
    const shown = table.kept.length;
    byId("request-count").textContent = shown === count ? counted(count, what) : `${shown.toLocaleString("en")} of ${counted(count, what)}`;
  };
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    table.filter((row) => words.every((word) => haystack[row].includes(word)));
    describe();
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && table.rows.length) table.choose(table.rows[0]);
  });
  describe();
  const first = report.listed.first >= 0 ? report.listed.first : table.rows[0];
  table.choose(first, false);
  showLife(first);
}

let lifeChart = null;

/** Show one request: its facts, the parts of its time, and a chart of its spans. */
function showLife(request) {
  lifeChart?.close();
  lifeChart = null;
  const site = listed.site[request], wall = listed.wall[request], parts = partsOf(request);
  const key = (report.listed.keys[request] ?? []).join(" "), trace = report.listed.traces[request];
  const facts = [`${timeText(wall)}`, `began at ${timeText(listed.start[request])}`, key && `key ${key}`,
    `span ${report.listed.ids[request]}`, trace && `trace ${trace}`].filter(Boolean);
  const life = element("article", { class: "life", "aria-label": `Life of ${siteName(site)}` },
    element("header", {}, element("h3", {}, siteLabel(site)),
      element("p", { class: "facts" }, ...facts.map((fact) => element("span", {}, fact)))));
  if (errorOf(request)) life.append(element("p", { class: "error" }, errorOf(request)));
  const blame = report.listed.blame[request];
  if (blame) life.append(element("p", { class: "blame" }, blame[0].toUpperCase() + blame.slice(1)));
  if (parts.length) {
    const longest = parts.slice().sort((a, b) => b[3] - a[3]);
    life.append(stack(parts), partsList(longest.map(([name, , ratio, ns]) => [name, timeText(ns), ratio])));
  }
  if (listed.has_spans[request]) addWaterfall(life, request);
  else {
    life.append(element("p", { class: "empty" },
      "Its spans are not in this page, which has those of the slowest and of one in the middle of each endpoint. " +
      `Ask for it: instrument report FILE --html PAGE --request ${key || report.listed.ids[request]}`));
  }
  byId("request-life").replaceChildren(life);
  lifeChart?.resize();
}

/** Return the bars of a request by lane: its own spans, its batches with the spans in them, and its device work. */
function waterfallOf(request) {
  const zero = listed.start[request], bars = new Map();
  const add = (span, more = {}) => {
    if (bars.has(span)) return;
    const start = spans.start[span] - zero, site = spans.site[span];
    bars.set(span, { span, start, end: start + spans.length[span], colour: kindColour(siteKind(site)), text: siteLabel(site),
      error: Boolean(errorOfSpan(span)), ...more });
  };
  for (const span of spansOfRequest.get(request) ?? []) add(span);
  for (let at = pairBegins[request]; at < pairBegins[request + 1]; at++) {
    const span = pairs.span[at];
    if (span < 0) continue;
    add(span, { colour: "batch", pair: at });
    const open = [...(below.get(span) ?? [])];
    while (open.length) {
      const inner = open.pop();
      add(inner, { faint: true });
      open.push(...(below.get(inner) ?? []));
    }
  }
  for (const bar of bars.values()) {
    const above = bars.get(bar.span - spans.parent[bar.span]);
    bar.above = above && above !== bar && spans.lane[above.span] === spans.lane[bar.span] ? above : null;
  }
  const found = [...d3.group(bars.values(), (bar) => spans.lane[bar.span])].map(([lane, its]) => ({ label: laneLabel(lane), bars: its, from: Math.min(...its.slice(0, 1000).map((bar) => bar.start)) }));
  const root = listed.span[request] >= 0 ? spans.lane[listed.span[request]] : -1;
  const labelOfRoot = root >= 0 ? laneLabel(root) : "";
  found.sort((a, b) => (b.label === labelOfRoot) - (a.label === labelOfRoot) || a.from - b.from);
  return { lanes: [...lifeLane(request), ...found, ...deviceLanesOf(bars, zero)], count: bars.size };
}

/** Return a lane with the turns of a request. */
function lifeLane(request) {
  if (!turns.count.length) return [];
  const its = [], given = new Map();
  for (let at = pairBegins[request]; at < pairBegins[request + 1]; at++) given.set(pairs.span[at], at);
  let until = 0;
  const unknown = (start, end) => its.push({ start, end, colour: "unknown", text: "unknown", part: "unknown" });
  for (let at = turnBegins[request]; at < turnBegins[request + 1]; at++) {
    const start = until + turns.after[at], part = report.turns.names[turns.part[at]];
    if (start > until) unknown(until, start);
    until = start + turns.length[at];
    const pair = part === SHARE ? given.get(turns.span[at]) : undefined;
    if (pair === undefined) {
      its.push({ start, end: until, colour: partColour(part), text: part, part, of: turns.span[at] });
    } else {
      const own = { ratio: Math.min(1, pairs.given[pair] / (turns.length[at] || 1)), colour: partColour(SHARE) };
      its.push({ start, end: until, colour: partColour(WAITING), text: "in a batch", part, of: turns.span[at], own, pair });
    }
  }
  if (until < listed.wall[request]) unknown(until, listed.wall[request]);
  return [{ label: "What it was, turn by turn", bars: its }];
}

function addWaterfall(life, request) {
  const { lanes: every, count } = waterfallOf(request);
  const shown = every.slice(0, MOST_LANES);
  const { chart, tools, detail } = searchableChart({ label: `Spans of ${siteName(listed.site[request])}`, lanes: shown,
    length: listed.wall[request], describe: (bar) => tellBar(bar, request) }, "Find a span", "bar");
  lifeChart = chart;
  tools.style.marginTop = "1rem";
  const kinds = new Set(shown.flatMap((lane) => lane.bars.filter((bar) => bar.span !== undefined).map((bar) => bar.colour)));
  life.append(tools, chart.node, legend([...kinds].sort().map((kind) => [kind, kind])));
  if (every.length > shown.length) life.append(element("p", { class: "note" }, `${every.length - shown.length} more lanes are not drawn.`));
  life.append(detail, spansTable(every, request, count));
}

/** Return the legend of a chart, from pairs of a colour and a name. */
function legend(items) {
  return element("div", { class: "legend" }, ...items.map(([colourOfItem, name]) => element("span", {}, swatch(colourOfItem), name)));
}

/** Return a title and named facts for a bar. */
function tellBar(bar, request) {
  const facts = [["at", timeText(bar.start)], ["took", timeText(bar.end - bar.start)]];
  if (bar.part) {
    facts.push(["of wall", shareText(bar.end - bar.start, listed.wall[request])]);
    if (bar.of >= 0) facts.push(["span", siteLabel(spans.site[bar.of])]);
    if (bar.pair !== undefined) facts.push(...factsOfPair(bar.pair));
    return [bar.text, facts];
  }
  if (bar.interval !== undefined) return tellInterval(bar, facts);
  const site = spans.site[bar.span];
  const [, kind, , where] = report.sites[site];
  facts.push(["self", timeText(selfOf(bar.span))], ["kind", kind]);
  if (bar.pair !== undefined) facts.push(...factsOfPair(bar.pair));
  if (where) facts.push(["code", where]);
  facts.push(["on", laneLabel(spans.lane[bar.span])]);
  if (errorOfSpan(bar.span)) facts.push(["error", errorOfSpan(bar.span)]);
  for (const [name, value] of Object.entries(report.attributes[bar.span] ?? {})) facts.push([name, value]);
  return [bar.text, facts];
}

/** Return the number of requests of a batch, and the share of this one. */
function factsOfPair(pair) {
  const given = pairs.given[pair];
  return [["serves", counted(pairs.size[pair], "request")], ["its share", `${timeText(given)}, ${shareText(given, spans.length[pairs.span[pair]])}`]];
}

/** Return the same spans as a table, for screen readers. */
function spansTable(lanes, request, count) {
  const details = element("details", {}, element("summary", {}, `${counted(count, "span")} as a table`));
  details.addEventListener("toggle", () => {
    if (details.childElementCount > 1) return;
    const its = lanes.flatMap((lane) => lane.bars.filter((bar) => bar.span !== undefined)).sort((a, b) => a.start - b.start).slice(0, SPAN_ROWS);
    const time = (label, value) => timeColumn(label, (row) => value(its[row]));
    const word = (label, value) => textColumn(label, (row) => value(its[row]));
    const columns = [word("Span", (bar) => bar.text), word("Kind", (bar) => siteKind(spans.site[bar.span])), time("At", (bar) => bar.start),
      time("Total", (bar) => bar.end - bar.start), time("Self", (bar) => selfOf(bar.span)), word("On", (bar) => laneLabel(spans.lane[bar.span]))];
    details.append(new SortableTable({ label: `Spans of ${siteName(listed.site[request])}`, columns, count: its.length, tall: true }).node);
    if (count > its.length) details.append(element("p", { class: "note" }, `The first ${its.length} of ${count}.`));
  });
  return details;
}

// The work of each stream of each device over the whole window, and the readings of gauges.

const device = columnsOf(report.device, ["start", "length", "lane", "name", "span", "label"], ["start", "span"]);
const DEVICE_COLOURS = ["own-1", "layer", "own-3", "comm", "own-5", "copy", "own-2", "step", "loader", "own-4"];

/** The indices of each span's device intervals, by the number of the span. */
const stretchesOf = d3.group(d3.range(device.start.length), (at) => device.span[at]);

function intervalBar(at, zero) {
  const start = device.start[at] - zero, name = report.device.names[device.name[at]];
  return { start, end: start + device.length[at], colour: DEVICE_COLOURS[device.name[at] % DEVICE_COLOURS.length], text: name, interval: at };
}

/** Return the lanes of streams that worked for some spans. */
function deviceLanesOf(bars, zero) {
  const lanes = d3.group([...bars.keys()].flatMap((span) => stretchesOf.get(span) ?? []), (at) => device.lane[at]);
  return [...lanes].sort((a, b) => a[0] - b[0]).map(([lane, its]) => ({ label: report.device.lanes[lane], bars: its.map((at) => intervalBar(at, zero)) }));
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
    const until = d3.max([report.about.window_ns, ...lanes.map((lane) => d3.max(lane.bars, (bar) => bar.end))]);
    const describe = (bar) => tellInterval(bar, [["at", timeText(bar.start)], ["took", timeText(bar.end - bar.start)]]);
    const { chart, tools, detail } = searchableChart({ label: "What devices did", lanes, length: until, describe }, "Find a kernel or span", "stretch");
    box.append(tools, chart.node, legendOfNames(), detail);
    chart.resize();
  }
  startGauges();
}

/** Return the legend of the names with most device time. */
function legendOfNames() {
  const sums = new Float64Array(report.device.names.length);
  for (let at = 0; at < device.start.length; at++) sums[device.name[at]] += device.length[at];
  const most = [...sums.keys()].filter((name) => sums[name] > 0).sort((a, b) => sums[b] - sums[a]).slice(0, DEVICE_COLOURS.length);
  return legend(most.map((name) => [DEVICE_COLOURS[name % DEVICE_COLOURS.length], report.device.names[name]]));
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
  for (const gauge of gauges) gauge.at = d3.cumsum(gauge.at);
  const box = byId("gauges");
  for (const of of new Set(gauges.map((gauge) => gauge.of))) {
    const grid = element("div", { class: "gauges" });
    for (const gauge of gauges.filter((one) => one.of === of)) {
      const x = d3.scaleLinear([0, Math.max(report.about.window_ns, gauge.at[gauge.at.length - 1], 1)], [0, 100]);
      const most = d3.max(gauge.values), least = Math.min(0, d3.min(gauge.values));
      const y = d3.scaleLinear([least, most > least ? most : least + 1], [54, 2]);
      const line = d3.line((_, at) => x(gauge.at[at]), (value) => y(value));
      const picture = d3.create("svg").attr("viewBox", "0 0 100 56").attr("preserveAspectRatio", "none").attr("aria-hidden", "true");
      picture.append("line").attr("x1", 0).attr("x2", 100).attr("y1", 55.5).attr("y2", 55.5).attr("stroke", "var(--line)").attr("vector-effect", "non-scaling-stroke");
      picture.append("path").attr("d", line(gauge.values));
      const svg = picture.node();
      svg.addEventListener("pointermove", (event) => {
        const at = d3.bisectCenter(gauge.at, x.invert(d3.pointer(event, svg)[0]));
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
  const [mean, p50, p99] = times;
  return element("div", { class: "endpoint" },
    element("header", {}, element("b", {}, name),
      element("span", { class: "muted" }, `${requests} requests · mean ${mean} ${unit} · p50 ${p50} · p99 ${p99}`)),
    stack(parts), partsList(parts.map(([part, , share, meanOfPart]) => [part, meanOfPart, share])));
}

startSummary();
startRequests();
startCalls();
startDevices();
startViews();
document.documentElement.dataset.ready = "true";
