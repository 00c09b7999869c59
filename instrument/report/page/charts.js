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
  constructor({ label, lanes, length, describe, pick }) {
    Object.assign(this, { lanes, length: Math.max(length, 1), describe, pick });
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
    this.canvas.addEventListener("click", (event) => this.choose(this.barAt(event)));
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
  }

  resize() {
    const width = this.box.clientWidth;
    if (!width || width === this.width) return;
    this.width = width;
    const ratio = devicePixelRatio || 1;
    for (const [canvas, height] of [[this.canvas, this.top], [this.axis, AXIS_HEIGHT]]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(Math.min(height, 16000) * ratio);
      canvas.style.height = `${Math.min(height, 16000)}px`;
    }
    this.zoom.translateExtent([[0, 0], [width, this.top]]).extent([[0, 0], [width, this.top]]);
    this.draw();
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

  /** Scroll and zoom to a bar. */
  reveal(bar) {
    const [first, last] = this.scale().domain(), width = this.width;
    if (bar.end < first || bar.start > last || (bar.end - bar.start) / (last - first) < 0.002) {
      const length = Math.max((bar.end - bar.start) * 12, this.length / 1e5);
      const factor = Math.max(1, this.length / length), middle = (bar.start + bar.end) / 2;
      this.zoom.transform(this.selection, d3.zoomIdentity.translate(width / 2 - (factor * middle * width) / this.length, 0).scale(factor));
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

// The call tree as an icicle chart: each call path is a box, as wide as the self times at and below it. A click opens a box.

const BOX_HEIGHT = 21, LEAST_WIDTH = 0.8;

const WIDTHS = [
  ["width", "All self time", "of all self times, those in which coroutines wait among them"],
  ["running", "Without waiting", "of self times, but for what coroutines waited"],
  ["on_device", "Device", "of device time"],
];

const calls = columnsOf(report.calls, ["name", "depth", "width", "running", "on_device", "calls", "errors", "total_ns", "self_ns", "waiting_ns",
  "device_ns", "min_ns", "max_ns", "p50_ns", "p99_ns", "remaining"]);

/** Return a tree with the rows as nodes. Its root has the row -1. */
function callTree() {
  const above = [-1];
  const children = d3.group(d3.range(calls.name.length), (row) => {
    above.length = calls.depth[row] + 1;
    above.push(row);
    return above[calls.depth[row]];
  });
  return d3.hierarchy(-1, (row) => children.get(row));
}

const callName = (row) => (row < 0 ? "all" : report.calls.names[calls.name[row]][0]);
const callKind = (row) => (row < 0 ? "user" : report.calls.names[calls.name[row]][1]);

function startCalls() {
  if (!calls.name.length) {
    byId("calls-search").closest(".tools").remove();
    byId("icicle").remove();
    byId("calls-detail").remove();
    byId("calls-path").replaceWith(element("p", { class: "empty" }, "No call was counted: name functions or layers in the profile, or open a scope."));
    return;
  }
  new Icicle();
}

class Icicle {
  constructor() {
    const topmost = d3.range(calls.name.length).filter((row) => !calls.depth[row]), sum = (by) => d3.sum(topmost, (row) => calls[by][row]);
    const offered = WIDTHS.filter(([by]) => sum(by) > 0 && (by !== "running" || sum(by) < sum("width")));
    // If most of the time is waiting, it would hide the running time.
    this.by = offered.some(([by]) => by === "running") ? "running" : offered[0]?.[0] ?? "width";
    for (const [by, label, title] of offered) {
      byId("calls-width").append(element("button", { type: "button", "data-by": by, title: `As wide as its share ${title}`, onclick: () => this.measure(by) }, label));
    }
    byId("calls-width").hidden = offered.length < 2;
    byId("calls-search").addEventListener("input", () => this.find());
    new ResizeObserver(() => this.draw()).observe(byId("calls"));
    themeListeners.push(() => this.draw());
    this.measure(this.by);
  }

  measure(by) {
    this.by = by;
    for (const button of byId("calls-width").children) button.setAttribute("aria-pressed", String(button.dataset.by === by));
    this.root = callTree().each((node) => {
      node.value = calls[by][node.data];
    });
    this.root.value = d3.sum(this.root.children ?? [], (node) => node.value);
    d3.partition().size([1, this.root.height + 1])(this.root);
    this.open(this.root.find((node) => node.data === (this.node ?? this.root).data));
  }

  /** Show a box at full width, with the boxes below it. */
  open(node, focus = false) {
    this.node = node;
    const path = byId("calls-path");
    path.replaceChildren(...node.ancestors().reverse().flatMap((one, at) => [
      at ? element("span", { "aria-hidden": "true" }, "›") : null,
      element("button", { type: "button", onclick: () => this.open(one), "aria-current": one === node ? "true" : null }, callName(one.data)),
    ].filter(Boolean)));
    this.describe(node);
    this.draw();
    if (focus) byId("icicle").querySelector(`[data-row="${node.data}"]`)?.focus();
  }

  draw() {
    const box = byId("icicle"), width = box.clientWidth, { x0, x1, depth } = this.node;
    if (!width) return;
    const scale = d3.scaleLinear([x0, x1 > x0 ? x1 : x0 + 1], [0, width]);
    const above = this.node.ancestors(), shown = [];
    let deepest = depth;
    (function add(node) {
      if (scale(node.x1) - scale(node.x0) < LEAST_WIDTH) return;
      shown.push(node);
      deepest = Math.max(deepest, node.depth);
      for (const child of node.children ?? []) add(child);
    })(this.node);
    const nodes = [...above.slice(1), ...shown];
    const svg = d3.select(box).selectAll("svg").data([0]).join("svg")
      .attr("width", width).attr("height", (deepest + 1) * BOX_HEIGHT).attr("role", "group").attr("aria-label", "Call tree; Enter opens a call path");
    const groups = svg.selectAll("g").data(nodes, (node) => node.data).join((enter) => {
      const group = enter.append("g").attr("role", "button").attr("tabindex", "0");
      group.append("rect");
      group.append("text");
      group.on("click", (event, node) => this.open(node === this.node ? node.parent ?? node : node));
      group.on("keydown", (event, node) => this.key(event, node));
      group.on("pointermove", (event, node) => showTip(this.facts(node), event.clientX, event.clientY));
      group.on("pointerleave", hideTip);
      return group;
    });
    const measure = document.createElement("canvas").getContext("2d");
    measure.font = getComputedStyle(svg.node()).font;
    const left = (node) => Math.max(0, scale(node.x0)), right = (node) => Math.min(width, scale(node.x1));
    groups.order().attr("data-row", (node) => node.data)
      .attr("aria-label", (node) => `${callName(node.data)}, ${shareText(node.value, this.root.value)}`)
      .attr("transform", (node) => `translate(${left(node)},${node.depth * BOX_HEIGHT})`)
      .classed("dim", (node) => Boolean(this.word) && !this.matches(node));
    groups.select("rect").attr("width", (node) => Math.max(right(node) - left(node), LEAST_WIDTH)).attr("height", BOX_HEIGHT - 1)
      .attr("fill", (node) => colour(this.colourOf(node))).attr("opacity", (node) => (above.includes(node) && node !== this.node ? 0.6 : 1));
    groups.select("text").attr("x", 5).attr("y", BOX_HEIGHT / 2 + 4).attr("fill", (node) => colour(inkOn(this.colourOf(node)))).text((node) => {
      const room = right(node) - left(node) - 9;
      return room > 10 ? fitted(measure, callName(node.data), room) : "";
    });
  }

  colourOf(node) {
    const row = node.data;
    return row < 0 || 2 * calls.waiting_ns[row] > calls.self_ns[row] ? "unknown" : kindColour(callKind(row));
  }

  key(event, node) {
    const next = { ArrowDown: node.children?.[0], ArrowUp: node.parent }[event.key]
      ?? (event.key.startsWith("Arrow") ? node.parent?.children[node.parent.children.indexOf(node) + (event.key === "ArrowRight" ? 1 : -1)] : null);
    if (event.key === "Enter" || event.key === " ") this.open(node === this.node ? node.parent ?? node : node, true);
    else if (event.key === "Escape" && this.node.parent) this.open(this.node.parent, true);
    else if (next) {
      byId("icicle").querySelector(`[data-row="${next.data}"]`)?.focus();
      this.describe(next);
    } else return;
    event.preventDefault();
  }

  matches(node) {
    return node.data >= 0 && callName(node.data).toLowerCase().includes(this.word);
  }

  find() {
    this.word = byId("calls-search").value.trim().toLowerCase();
    const found = this.word ? this.root.descendants().filter((node) => this.matches(node)) : [];
    byId("calls-found").textContent = this.word ? counted(found.length, "call path") : "";
    this.draw();
  }

  /** Return the figures of the view `events` for a call path. */
  facts(node) {
    const row = node.data;
    const facts = [["width", `${timeText(node.value)}, ${shareText(node.value, this.root.value)} of all`]];
    if (row < 0) return ["all", facts];
    const known = (name, ns) => ns >= 0 && facts.push([name, timeText(ns)]);
    facts.push(["calls", calls.calls[row].toLocaleString("en")]);
    known("total", calls.total_ns[row]);
    known("self", calls.self_ns[row]);
    if (calls.waiting_ns[row] > 0) known("of it waiting", calls.waiting_ns[row]);
    if (calls.device_ns[row] > 0) known("device", calls.device_ns[row]);
    known("p50", calls.p50_ns[row]);
    known("p99", calls.p99_ns[row]);
    known("max", calls.max_ns[row]);
    if (calls.errors[row] > 0) facts.push(["errors", calls.errors[row].toLocaleString("en")]);
    if (callKind(row)) facts.push(["kind", callKind(row)]);
    return [callName(row), facts];
  }

  describe(node) {
    const [title, facts] = this.facts(node);
    byId("calls-detail").replaceChildren(element("b", {}, title), " ", facts.map(([name, value]) => `${name} ${value}`).join(" · "));
  }
}
