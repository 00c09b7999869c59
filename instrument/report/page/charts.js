// Bars on lanes over a time axis, on a canvas: drag to move, Ctrl and the wheel to zoom, arrow keys from bar to bar.

const ROW_HEIGHT = 18, LABEL_HEIGHT = 17, LANE_GAP = 7, AXIS_HEIGHT = 24;

/** Set a row for each bar of a lane, so that none covers another: below its caller's row, or in the next free row. */
function stackBars(bars) {
  const ends = [];
  const ordered = bars.slice().sort((a, b) => a.start - b.start || b.end - a.end);
  for (const bar of ordered) {
    let row = bar.above ? (bar.above.row ?? -1) + 1 : 0;
    while (row < ends.length && ends[row] > bar.start) row++;
    while (ends.length <= row) ends.push(-Infinity);
    ends[row] = bar.end;
    bar.row = row;
  }
  return ends.length;
}

/**
 * A chart of `lanes`. Each has a `label` and `bars` with `start`, `end`, `colour`, `text` and the other fields for
 * `describe`; the share `own.ratio` of its height has another colour. Times are ns after `zero`; the first `length` ns are shown.
 */
class LaneChart {
  constructor({ label, lanes, length, describe, pick, opens = null }) {
    Object.assign(this, { lanes, length: Math.max(length, 1), describe, pick, opens });
    this.top = 0;
    for (const lane of lanes) {
      const rows = stackBars(lane.bars);
      lane.rows = Array.from({ length: rows }, () => []);
      for (const bar of lane.bars.sort((a, b) => a.start - b.start)) lane.rows[bar.row].push(bar);
      lane.y = this.top;
      this.top += (lane.label ? LABEL_HEIGHT : 0) + rows * ROW_HEIGHT + LANE_GAP;
    }
    this.axis = element("canvas", { class: "axis", "aria-hidden": "true" });
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label":
      `${label}. Arrow keys go from bar to bar, plus and minus zoom, 0 shows all.` });
    this.box = element("div", { class: "chart-box" }, this.axis, this.canvas);
    this.node = element("div", { class: "chart" }, this.box);
    this.chosen = null;
    this.matching = null;
    this.transform = d3.zoomIdentity;
    this.zoom = d3.zoom().scaleExtent([1, 1e6]).filter((event) =>
      event.type === "wheel" ? event.ctrlKey || event.metaKey || event.shiftKey : !event.button && (event.touches?.length ?? 2) > 1);
    this.zoom.on("zoom", (event) => {
      this.transform = event.transform;
      this.draw();
    });
    this.selection = d3.select(this.canvas).call(this.zoom);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("click", (event) => {
      const bar = this.barAt(event);
      this.choose(bar);
      if (bar) this.open(bar);
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.node);
    themeListeners.push(this.redraw = () => this.node.isConnected && this.draw());
  }

  /** Remove the chart, so that another one can replace it. */
  close() {
    this.observer.disconnect();
    themeListeners.splice(themeListeners.indexOf(this.redraw), 1);
  }

  buttons() {
    const zoomBy = (factor) => () => this.zoom.scaleBy(this.selection, factor);
    return element("div", { class: "zoom", role: "group", "aria-label": "Zoom" },
      element("button", { type: "button", "aria-label": "Zoom in", onclick: zoomBy(2) }, "+"),
      element("button", { type: "button", "aria-label": "Zoom out", onclick: zoomBy(0.5) }, "−"),
      element("button", { type: "button", onclick: () => this.reset() }, "All"));
  }

  reset() {
    this.zoom.transform(this.selection, d3.zoomIdentity);
    this.opens?.(null);
  }

  resize() {
    const width = this.box.clientWidth, range = this.width ? this.scale().domain() : [0, this.length];
    if (!width || width === this.width) return;
    this.width = width;
    const ratio = devicePixelRatio || 1;
    for (const [canvas, height] of [[this.canvas, this.top], [this.axis, AXIS_HEIGHT]]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(Math.min(height, 16000) * ratio);
      canvas.style.height = `${Math.min(height, 16000)}px`;
    }
    this.zoom.translateExtent([[0, 0], [width, this.top]]).extent([[0, 0], [width, this.top]]);
    this.show(...range);
  }

  /** Return the scale from times to x coordinates on the canvas. */
  scale() {
    return this.transform.rescaleX(d3.scaleLinear([0, this.length], [0, this.width]));
  }

  draw() {
    if (!this.width) return;
    const scale = this.scale(), [first, last] = scale.domain(), perNs = this.width / (last - first);
    this.drawAxis(scale);
    const context = this.begin(this.canvas);
    context.fillStyle = colour("ground");
    context.fillRect(0, 0, this.width, this.top);
    context.strokeStyle = colour("line");
    context.beginPath();
    for (const [at] of this.ticks(scale)) {
      const x = Math.round(at) + 0.5;
      context.moveTo(x, 0);
      context.lineTo(x, this.top);
    }
    context.stroke();
    context.textBaseline = "middle";
    context.font = "12px system-ui, sans-serif";
    for (const lane of this.lanes) {
      let y = lane.y;
      if (lane.label) {
        context.fillStyle = colour("soft");
        context.fillText(fitted(context, lane.label, this.width - 8), 4, y + LABEL_HEIGHT / 2 + 1);
        y += LABEL_HEIGHT;
      }
      for (const row of lane.rows) {
        this.drawRow(context, row, y, first, last, perNs);
        y += ROW_HEIGHT;
      }
    }
  }

  drawRow(context, row, y, first, last, perNs) {
    let narrow = null;  // the bars in one column of pixels, drawn as dense as their sum
    const flush = () => {
      if (narrow) {
        context.globalAlpha = narrow.dim * Math.min(1, Math.max(narrow.width, 0.12));
        context.fillStyle = colour(narrow.colour);
        context.fillRect(narrow.x, y, 1, ROW_HEIGHT - 2);
        context.globalAlpha = 1;
      }
      narrow = null;
    };
    for (let at = firstEndingAfter(row, first); at < row.length && row[at].start < last; at++) {
      const bar = row[at];
      const x = Math.max((bar.start - first) * perNs, -2), end = Math.min((bar.end - first) * perNs, this.width + 2);
      const isMarked = bar === this.chosen || bar === this.under;
      const isDim = this.matching !== null && !this.matching.has(bar), dim = isDim ? 0.22 : bar.faint ? 0.55 : 1;
      if (end - x < 1 && !isMarked) {
        const place = Math.floor(x);
        if (narrow?.x !== place) flush();
        narrow ??= { x: place, width: 0, most: 0, dim: 0 };
        narrow.width += end - x;
        if (dim > narrow.dim || (dim === narrow.dim && end - x >= narrow.most)) Object.assign(narrow, { dim, most: end - x, colour: bar.colour });
        continue;
      }
      flush();
      const width = Math.max(end - x - (end - x > 4 ? 1 : 0), 0.8);
      context.globalAlpha = dim;
      context.fillStyle = colour(bar.colour);
      context.fillRect(x, y, width, ROW_HEIGHT - 2);
      if (bar.own) {
        const height = Math.max(1, (ROW_HEIGHT - 2) * bar.own.ratio);
        context.fillStyle = colour(bar.own.colour);
        context.fillRect(x, y + ROW_HEIGHT - 2 - height, width, height);
      }
      if (bar.error && width > 2) {
        context.fillStyle = colour("bad");
        context.fillRect(x, y, Math.min(3, width), ROW_HEIGHT - 2);
      }
      if (width > 26) {
        const from = Math.max(x, 0);
        context.fillStyle = colour(isDim ? "ink" : inkOn(bar.colour));
        context.fillText(fitted(context, bar.text, Math.min(end, this.width) - from - 8), from + 4, y + ROW_HEIGHT / 2 - 0.5);
      }
      context.globalAlpha = 1;
      if (isMarked) {
        context.strokeStyle = colour("ink");
        context.lineWidth = bar === this.chosen ? 2 : 1;
        context.strokeRect(x + 0.5, y + 0.5, Math.max(width - 1, 1), ROW_HEIGHT - 3);
        context.lineWidth = 1;
      }
    }
    flush();
  }

  begin(canvas) {
    const context = canvas.getContext("2d"), ratio = devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return context;
  }

  /** Return the x coordinate and the text of each tick. */
  ticks(scale) {
    const inUnit = scale.copy().domain(scale.domain().map((ns) => ns / unitNs)), count = Math.max(2, this.width / 110);
    const text = inUnit.tickFormat(count);
    return inUnit.ticks(count).map((tick) => [inUnit(tick), `${text(tick)} ${unit}`]);
  }

  drawAxis(scale) {
    const context = this.begin(this.axis);
    context.fillStyle = colour("raised");
    context.fillRect(0, 0, this.width, AXIS_HEIGHT);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (const [x, text] of this.ticks(scale)) {
      const width = context.measureText(text).width;
      context.fillStyle = colour("strong-line");
      context.fillRect(Math.round(x), AXIS_HEIGHT - 5, 1, 5);
      context.fillStyle = colour("soft");
      context.fillText(text, Math.min(Math.max(x - width / 2, 3), this.width - width - 3), 10);
    }
  }

  barAt(event) {
    const [x, y] = d3.pointer(event, this.canvas), scale = this.scale();
    for (const lane of this.lanes) {
      const row = Math.floor((y - lane.y - (lane.label ? LABEL_HEIGHT : 0)) / ROW_HEIGHT);
      if (row < 0 || row >= lane.rows.length) continue;
      const bars = lane.rows[row];
      let best = null, distance = 3;
      for (let next = firstEndingAfter(bars, scale.invert(x - 2)); next < bars.length && scale(bars[next].start) <= x + 3; next++) {
        const apart = Math.max(scale(bars[next].start) - x, x - scale(bars[next].end), 0);
        if (apart < distance) [best, distance] = [bars[next], apart];
      }
      return best;
    }
    return null;
  }

  hover(event) {
    const bar = this.barAt(event);
    if (bar) showTip(this.describe(bar), event.clientX, event.clientY);
    else hideTip();
    if (bar !== this.under) {
      this.under = bar;
      this.draw();
    }
  }

  leave() {
    hideTip();
    this.under = null;
    this.draw();
  }

  choose(bar) {
    this.chosen = bar;
    this.draw();
    if (bar) this.pick?.(bar);
  }

  /** Show a bar, or all, at full width, if bars of the chart can be opened. */
  open(bar) {
    if (!this.opens) return;
    this.opens(bar);
    this.show(bar?.start ?? 0, bar?.end ?? this.length);
  }

  /** Zoom to a range of times. */
  show(first, last) {
    const factor = Math.max(1, this.length / (last - first));
    this.zoom.transform(this.selection, d3.zoomIdentity.translate((-factor * first * this.width) / this.length, 0).scale(factor));
  }

  /** Scroll and zoom to a bar. */
  reveal(bar) {
    const [first, last] = this.scale().domain();
    if (bar.end < first || bar.start > last || (bar.end - bar.start) / (last - first) < 0.002) {
      const half = Math.min(Math.max((bar.end - bar.start) * 12, this.length / 1e5), this.length) / 2, middle = (bar.start + bar.end) / 2;
      this.show(middle - half, middle + half);
    }
    const lane = this.lanes.find((one) => one.rows[bar.row]?.includes(bar));
    const y = AXIS_HEIGHT + lane.y + LABEL_HEIGHT + bar.row * ROW_HEIGHT;
    if (y < this.box.scrollTop || y > this.box.scrollTop + this.box.clientHeight - ROW_HEIGHT) this.box.scrollTop = y - 60;
    this.choose(bar);
  }

  key(event) {
    const rows = this.lanes.flatMap((lane) => lane.rows).filter((row) => row.length);
    if (!rows.length) return;
    if (event.key === "+" || event.key === "=") this.zoom.scaleBy(this.selection, 2);
    else if (event.key === "-") this.zoom.scaleBy(this.selection, 0.5);
    else if (event.key === "0") this.reset();
    else if (event.key === "Enter" && this.chosen) this.open(this.chosen);
    else if (event.key.startsWith("Arrow")) {
      const at = this.chosen ? rows.findIndex((row) => row.includes(this.chosen)) : -1;
      if (at < 0) this.reveal(rows[0][0]);
      else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        const next = rows[at].indexOf(this.chosen) + (event.key === "ArrowRight" ? 1 : -1);
        if (rows[at][next]) this.reveal(rows[at][next]);
      } else {
        const row = rows[at + (event.key === "ArrowDown" ? 1 : -1)];
        if (row) this.reveal(row[Math.min(firstEndingAfter(row, this.chosen.start), row.length - 1)]);
      }
    } else return;
    event.preventDefault();
  }

  /** Dim the bars for which a test is false (no test: none). Return the other bars, ordered by begin. */
  find(wanted) {
    const found = wanted ? this.lanes.flatMap((lane) => lane.bars.filter(wanted)) : [];
    this.matching = wanted ? new Set(found) : null;
    this.draw();
    return found.sort((a, b) => a.start - b.start);
  }
}

/** Return a chart with its tools (search by name, in which Enter shows the next bar, and zoom) and the facts on the selected bar. */
function searchableChart(options, placeholder, noun) {
  const detail = element("div", { class: "detail", role: "status" }, `Hover over a ${noun}, or choose one. Drag to move, Ctrl and the wheel to zoom.`);
  const chart = new LaneChart({ ...options, pick: (bar) => {
    const [title, facts] = options.describe(bar);
    detail.replaceChildren(element("b", {}, title), factsList(facts));
  } });
  const count = element("span", { class: "muted", role: "status" });
  const search = element("input", { type: "search", placeholder, autocomplete: "off", spellcheck: "false", class: "find-span" });
  let hits = [], at = 0;
  search.addEventListener("input", () => {
    const word = search.value.trim().toLowerCase();
    hits = chart.find(word ? (bar) => bar.text.toLowerCase().includes(word) : null);
    at = 0;
    count.textContent = word ? counted(hits.length, noun) : "";
  });
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !hits.length) return;
    chart.reveal(hits[at % hits.length]);
    count.textContent = `${(at++ % hits.length) + 1} of ${hits.length}`;
  });
  const field = element("label", { class: "search" }, element("span", { class: "sr" }, placeholder), search);
  return { chart, detail, tools: element("div", { class: "tools" }, field, count, chart.buttons()) };
}

/** Return the index of the first bar that ends after a time. The bars of a row do not overlap. */
const firstEndingAfter = d3.bisector((bar) => bar.end).left;

/** Return a text, cut to a width in pixels in the font of a canvas. */
function fitted(context, text, width) {
  const whole = context.measureText(text).width;
  if (whole <= width) return text;
  let room = Math.floor((text.length * width) / whole);
  while (room > 1 && context.measureText(`${text.slice(0, room)}…`).width > width) room--;
  return room < 2 ? "" : `${text.slice(0, room)}…`;
}

// The call tree: a bar for each call path, as wide as the self times at and below it. A click shows a bar at full width.

const WIDTHS = [
  ["width", "All self time", "of all self times, those in which coroutines wait among them"],
  ["running", "Without waiting", "of self times, but for what coroutines waited"],
  ["on_device", "Device", "of device time"],
];

const calls = columnsOf(report.calls, ["name", "depth", "width", "running", "on_device", "calls", "errors", "total_ns", "self_ns", "waiting_ns",
  "device_ns", "min_ns", "max_ns", "p50_ns", "p99_ns", "remaining"]);

/** Return the bars of call paths with a width. The bars of callees begin with their caller's bar, one after the other. */
function barsOfCalls(by) {
  const above = [], ends = [0];
  const bars = d3.range(calls.name.length).map((call) => {
    const depth = calls.depth[call], start = ends[depth], end = start + calls[by][call];
    const [text, kind] = report.calls.names[calls.name[call]];
    [ends[depth], ends[depth + 1]] = [end, start];
    above[depth] = { call, start, end, text, kind, above: depth ? above[depth - 1] : null,
      colour: 2 * calls.waiting_ns[call] > calls.self_ns[call] ? "unknown" : kindColour(kind) };
    return above[depth];
  });
  return bars.filter((bar) => bar.end > bar.start);
}

function startCalls() {
  const buttons = element("div", { class: "choice", role: "group", "aria-label": "Width" }), box = byId("call-tree");
  if (!calls.name.length) {
    box.append(element("p", { class: "empty" }, "No call was counted: name functions or layers in the profile, or open a scope."));
    return;
  }
  const topmost = d3.range(calls.name.length).filter((row) => !calls.depth[row]), sum = (by) => d3.sum(topmost, (row) => calls[by][row]);
  const offered = WIDTHS.filter(([by]) => sum(by) > 0 && (by !== "running" || sum(by) < sum("width")));
  let chart = null, opened = null;
  const measure = (by) => {
    for (const button of buttons.children) button.setAttribute("aria-pressed", String(button.dataset.by === by));
    const length = sum(by), bars = barsOfCalls(by), path = element("div", { class: "path" });
    const opens = (bar) => {
      opened = bar;
      const inside = [];
      for (let at = bar; at; at = at.above) inside.unshift(at);
      path.replaceChildren(...[null, ...inside].flatMap((at) => [element("span", { "aria-hidden": "true" }, "›"),
        element("button", { type: "button", onclick: () => chart.open(at), "aria-current": at === bar ? "true" : null }, at?.text ?? "all")]).slice(1));
    };
    chart?.close();
    const made = searchableChart({ label: "Call tree; Enter opens a call path", lanes: [{ bars }], length, opens,
      describe: (bar) => tellCall(bar, length) }, "Find a function", "call path");
    chart = made.chart;
    made.tools.prepend(buttons);
    box.replaceChildren(made.tools, path, chart.node, made.detail);
    chart.resize();
    chart.open(bars.find((bar) => bar.call === opened?.call) ?? null);
  };
  for (const [by, label, title] of offered) {
    buttons.append(element("button", { type: "button", "data-by": by, title: `As wide as its share ${title}`, onclick: () => measure(by) }, label));
  }
  buttons.hidden = offered.length < 2;
  // If most of the time is waiting, it would hide the running time.
  measure(offered.some(([by]) => by === "running") ? "running" : offered[0]?.[0] ?? "width");
}

/** Return the figures of the view `events` for a call path. */
function tellCall({ call, start, end, text, kind }, whole) {
  const facts = [["width", `${timeText(end - start)}, ${shareText(end - start, whole)} of all`], ["calls", calls.calls[call].toLocaleString("en")]];
  const add = (name, ns, least = 0) => ns >= least && facts.push([name, timeText(ns)]);
  add("total", calls.total_ns[call]);
  add("self", calls.self_ns[call]);
  add("of it waiting", calls.waiting_ns[call], 1);
  add("device", calls.device_ns[call], 1);
  for (const name of ["p50", "p99", "max"]) add(name, calls[`${name}_ns`][call]);
  if (calls.errors[call] > 0) facts.push(["errors", calls.errors[call].toLocaleString("en")]);
  if (kind) facts.push(["kind", kind]);
  return [text, facts];
}
