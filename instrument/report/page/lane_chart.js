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
    for (const tick of this.ticks(scale)) {
      const x = Math.round(scale(tick)) + 0.5;
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

  ticks(scale) {
    return scale.copy().domain(scale.domain().map((ns) => ns / unitNs)).ticks(Math.max(2, this.width / 110)).map((at) => at * unitNs);
  }

  drawAxis(scale) {
    const context = this.begin(this.axis);
    context.fillStyle = colour("raised");
    context.fillRect(0, 0, this.width, AXIS_HEIGHT);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const inUnit = scale.copy().domain(scale.domain().map((ns) => ns / unitNs));
    const tickText = inUnit.tickFormat(Math.max(2, this.width / 110));
    context.fillStyle = colour("soft");
    for (const tick of inUnit.ticks(Math.max(2, this.width / 110))) {
      const x = inUnit(tick), text = `${tickText(tick)} ${unit}`, width = context.measureText(text).width;
      context.fillStyle = colour("strong-line");
      context.fillRect(Math.round(x), AXIS_HEIGHT - 5, 1, 5);
      context.fillStyle = colour("soft");
      context.fillText(text, Math.min(Math.max(x - width / 2, 3), this.width - width - 3), 10);
    }
  }

  barAt(event) {
    const box = this.canvas.getBoundingClientRect();
    return this.barAtPoint(event.clientX - box.left, event.clientY - box.top);
  }

  barAtPoint(x, y) {
    const scale = this.scale();
    for (const lane of this.lanes) {
      const row = Math.floor((y - lane.y - (lane.label ? LABEL_HEIGHT : 0)) / ROW_HEIGHT);
      if (row < 0 || row >= lane.rows.length) continue;
      const bars = lane.rows[row], at = firstEndingAfter(bars, scale.invert(x - 2));
      let best = null, distance = 3;
      for (let next = at; next < bars.length && scale(bars[next].start) <= x + 3; next++) {
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
function firstEndingAfter(row, time) {
  let low = 0, high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row[middle].end < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Return a text, cut to a width in pixels in the font of a canvas. */
function fitted(context, text, width) {
  const whole = context.measureText(text).width;
  if (whole <= width) return text;
  let room = Math.floor((text.length * width) / whole);
  while (room > 1 && context.measureText(`${text.slice(0, room)}…`).width > width) room--;
  return room < 2 ? "" : `${text.slice(0, room)}…`;
}
