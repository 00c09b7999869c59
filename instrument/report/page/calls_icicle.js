// The call tree as an icicle chart: each call path is a box, as wide as the self times at and below it. A click opens a box.

const BOX_HEIGHT = 21, LEAST_WIDTH = 0.8;

const WIDTHS = [
  ["width", "All self time", "of all self times, those in which coroutines wait among them"],
  ["running", "Without waiting", "of self times, but for what coroutines waited"],
  ["on_device", "Device", "of device time"],
];

const calls = columnsOf(report.calls, ["name", "depth", "width", "running", "on_device", "calls", "errors", "total_ns", "self_ns", "waiting_ns",
  "device_ns", "min_ns", "max_ns", "p50_ns", "p99_ns", "remaining"]);

/** Return the rows as a tree with one root. */
function callTree() {
  const root = { row: -1, children: [] };
  const above = [root];
  for (let row = 0; row < calls.name.length; row++) {
    const node = { row, children: [] };
    above.length = calls.depth[row] + 1;
    above[calls.depth[row]].children.push(node);
    above.push(node);
  }
  return root;
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
  new Icicle(callTree());
}

class Icicle {
  constructor(tree) {
    this.tree = tree;
    const sum = (by) => tree.children.reduce((all, node) => all + calls[by][node.row], 0);
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
    this.root = d3.hierarchy(this.tree, (node) => node.children);
    this.root.each((node) => {
      node.value = node.data.row < 0 ? 0 : calls[by][node.data.row];
    });
    this.root.value = d3.sum(this.root.children ?? [], (node) => node.value);
    d3.partition().size([1, this.root.height + 1])(this.root);
    this.nodes = new Map(this.root.descendants().map((node) => [node.data.row, node]));
    this.open(this.nodes.get(this.opened ?? -1));
  }

  /** Show a box at full width, with the boxes below it. */
  open(node, focus = false) {
    this.opened = node.data.row;
    this.node = node;
    const path = byId("calls-path");
    path.replaceChildren(...node.ancestors().reverse().flatMap((one, at) => [
      at ? element("span", { "aria-hidden": "true" }, "›") : null,
      element("button", { type: "button", onclick: () => this.open(one), "aria-current": one === node ? "true" : null }, callName(one.data.row)),
    ].filter(Boolean)));
    this.describe(node);
    this.draw();
    if (focus) byId("icicle").querySelector(`[data-row="${node.data.row}"]`)?.focus();
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
    const groups = svg.selectAll("g").data(nodes, (node) => node.data.row).join((enter) => {
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
    groups.order().attr("data-row", (node) => node.data.row)
      .attr("aria-label", (node) => `${callName(node.data.row)}, ${shareText(node.value, this.root.value)}`)
      .attr("transform", (node) => `translate(${left(node)},${node.depth * BOX_HEIGHT})`)
      .classed("dim", (node) => Boolean(this.word) && !this.matches(node));
    groups.select("rect").attr("width", (node) => Math.max(right(node) - left(node), LEAST_WIDTH)).attr("height", BOX_HEIGHT - 1)
      .attr("fill", (node) => colour(this.colourOf(node))).attr("opacity", (node) => (above.includes(node) && node !== this.node ? 0.6 : 1));
    groups.select("text").attr("x", 5).attr("y", BOX_HEIGHT / 2 + 4).attr("fill", (node) => colour(inkOn(this.colourOf(node)))).text((node) => {
      const room = right(node) - left(node) - 9;
      return room > 10 ? fitted(measure, callName(node.data.row), room) : "";
    });
  }

  colourOf(node) {
    const { row } = node.data;
    return row < 0 || 2 * calls.waiting_ns[row] > calls.self_ns[row] ? "unknown" : kindColour(callKind(row));
  }

  key(event, node) {
    const next = { ArrowDown: node.children?.[0], ArrowUp: node.parent }[event.key]
      ?? (event.key.startsWith("Arrow") ? node.parent?.children[node.parent.children.indexOf(node) + (event.key === "ArrowRight" ? 1 : -1)] : null);
    if (event.key === "Enter" || event.key === " ") this.open(node === this.node ? node.parent ?? node : node, true);
    else if (event.key === "Escape" && this.node.parent) this.open(this.node.parent, true);
    else if (next) {
      byId("icicle").querySelector(`[data-row="${next.data.row}"]`)?.focus();
      this.describe(next);
    } else return;
    event.preventDefault();
  }

  matches(node) {
    return node.data.row >= 0 && callName(node.data.row).toLowerCase().includes(this.word);
  }

  find() {
    this.word = byId("calls-search").value.trim().toLowerCase();
    const found = this.word ? this.root.descendants().filter((node) => this.matches(node)) : [];
    byId("calls-found").textContent = this.word ? counted(found.length, "call path") : "";
    this.draw();
  }

  /** Return the figures of the view `events` for a call path. */
  facts(node) {
    const { row } = node.data;
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
