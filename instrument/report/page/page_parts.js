// The document of the page, and its columns of numbers.

/** The data of the page, from deflated JSON in base64. */
async function unpackedReport() {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

if (typeof DecompressionStream === "undefined") {
  const died = document.getElementById("died");
  died.hidden = false;
  died.textContent = "This browser cannot unpack the page: open it with one that is no older than the middle of 2023.";
}
const report = await unpackedReport();

/** Return the index at which each group's numbers begin, and the end of the last one. */
const beginsOf = (counts) => [0, ...d3.cumsum(counts)];

/** Return the columns of an object, by name. Those in `summed` are stored as differences. */
function columnsOf(object, names, summed = []) {
  const found = {};
  for (const name of names) found[name] = summed.includes(name) ? d3.cumsum(object[name] ?? []) : object[name] ?? [];
  return found;
}

// Shared by all parts of the page: elements, numbers as text, colours, the tooltip, the theme.

/** Return an element with attributes, listeners (`on...`), and children. Strings become text, never markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const byId = (id) => document.getElementById(id);

/** Return a number that rounds to `digits` digits (0: to an integer) as in Python: a half to the even digit. */
function halfToEven(value, digits) {
  const [mantissa, exponent] = Math.abs(value).toExponential(60).split("e");
  const all = mantissa.replace(".", ""), kept = digits || Number(exponent) + 1;
  return kept > 0 && /^50+$/.test(all.slice(kept)) && Number(all[kept - 1]) % 2 === 0 ? value * (1 - 1e-15) : value;
}

/** Return four significant digits in at most seven columns, like `compact` in report/table.py. */
function compact(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const isWhole = Math.abs(value) >= 1000 || Number.isInteger(value);
  for (const digits of isWhole ? [0] : [4, 3]) {
    const text = isWhole ? halfToEven(value, 0).toFixed(0) : String(Number(halfToEven(value, digits).toPrecision(digits)));
    if (text.length <= 7 && !text.includes("e")) return text;
  }
  for (const after of [2, 1, 0]) {
    const [mantissa, exponent] = value.toExponential(after).split("e");
    const text = `${after ? mantissa.replace(/\.?0+$/, "") : mantissa}e${Number(exponent)}`;
    if (text.length <= 7 || !after) return text;
  }
  return "-";
}

const { unit, unit_ns: unitNs } = report.about;

/** Return a time in the page's unit, followed by the unit. */
const timeText = (ns) => `${unit === "ns" ? Math.round(ns) : compact(ns / unitNs)} ${unit}`;

/** Return a share as a percentage with one decimal. */
const shareText = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)}%` : "-");

const counted = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : what.endsWith("ch") ? "es" : "s"}`;

// Colours

const OWN_COLOURS = 6;
const PART_COLOURS = {
  queue: "queue", stall: "stall", transport: "transport", unknown: "unknown", "share of batches": "share",
  "waiting in batches": "waiting",
};
const colourOfPart = new Map();
let ownParts = 0;

/** Return the name of the colour for a part of requests. Parts of the ledger have fixed colours, phases take turns. */
function partColour(name) {
  if (!colourOfPart.has(name)) {
    const own = Object.hasOwn(PART_COLOURS, name) ? PART_COLOURS[name] : null;
    colourOfPart.set(name, own ?? `own-${(ownParts++ % OWN_COLOURS) + 1}`);
  }
  return colourOfPart.get(name);
}

/** Return the colour for a kind of span. Colours are named after kinds and defined in `page.css`. */
const kindColour = (kind) => (colour(kind) ? kind : "user");

let colours = new Map();
/** Return the value of a colour in the current theme. */
function colour(name) {
  if (!colours.has(name)) {
    colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  }
  return colours.get(name);
}

/** Return the colour of text on a background colour. Muted colours are dark in the dark theme. */
const inkOn = (name) => (name === "unknown" || name === "waiting" ? "ink" : "bar-ink");

function swatch(name) {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = `var(--${name})`;
  return made;
}

/** Return a bar of parts, `[name, share, text]` each. Screen readers read it as one text. */
function stack(parts, size = "") {
  const shown = parts.filter(([, ratio]) => ratio > 0);
  const label = shown.map(([name, ratio, text]) => `${name} ${text ?? shareText(ratio, 1)}`).join(", ");
  const made = element("div", { class: `stack ${size}`, role: "img", "aria-label": label });
  for (const [name, ratio, text] of shown) {
    const part = element("span", {});
    part.style.width = `${100 * ratio}%`;
    part.style.background = `var(--${partColour(name)})`;
    if (!size) withTip(part, () => [name, [["share", text ?? shareText(ratio, 1)]]]);
    made.append(part);
  }
  return made;
}

/** Return a list of parts: the name, the time and the share of each. */
function partsList(parts) {
  return element("ul", { class: "parts" }, ...parts.map(([name, time, share]) => element("li", {}, swatch(partColour(name)),
    element("span", { class: "n", title: name }, name), element("span", { class: "v" }, time), element("span", { class: "r" }, share))));
}

// The tooltip

const tip = byId("tip");

/** Show `[title, [[name, value], ...]]` next to a point of the window. */
function showTip(content, x, y) {
  const [title, facts] = content;
  tip.replaceChildren(element("b", {}, title), factsList(facts));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
}

function hideTip() {
  tip.hidden = true;
}

function withTip(target, describe) {
  target.addEventListener("pointermove", (event) => showTip(describe(), event.clientX, event.clientY));
  target.addEventListener("pointerleave", hideTip);
}

function factsList(facts) {
  const list = element("dl");
  for (const [name, value] of facts) list.append(element("dt", {}, name), element("dd", {}, value));
  return list;
}

addEventListener("scroll", hideTip, { passive: true });

// The theme is the system's.

const themeListeners = [];
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = new Map();
  for (const listener of themeListeners) listener();
});

// Tables. A click on a heading sorts them: first in the usual direction, then in the other, then in the original order.

const ROWS_AT_ONCE = 100, ROWS_OF_A_VIEW = 25, NAME_CHARACTERS = 63;

/** Return an element whose text is cut in its middle if it is long, since paths differ at their ends. */
const shortened = (text) => (text.length <= NAME_CHARACTERS ? text
  : `${text.slice(0, NAME_CHARACTERS / 3)}…${text.slice(1 + NAME_CHARACTERS / 3 - NAME_CHARACTERS)}`);

/**
 * A table of `count` rows. A column has a `label`, an optional `unit`, a `kind`, the `value` of a row to sort by (null for
 * none) and its `text`, or a `node`. `pick` is called with the selected row. `more` rows are shown on demand.
 */
class SortableTable {
  constructor({ label, columns, count, depths = [], pick = null, tall = false, atFirst = ROWS_AT_ONCE }) {
    Object.assign(this, { columns, count, depths, pick, atFirst });
    this.order = Array.from({ length: count }, (_, row) => row);
    this.kept = this.order;
    this.sorted = { column: -1, way: "none" };
    this.picked = -1;
    this.body = element("tbody");
    this.headings = columns.map((column, at) => this.heading(column, at));
    this.table = element("table", {}, element("caption", { class: "sr" }, label),
      element("thead", {}, element("tr", {}, ...this.headings)), this.body);
    this.rest = element("button", { type: "button", class: "more", onclick: () => this.showMore() });
    const box = element("div", { class: `scroll${tall ? " tall" : ""}`, tabindex: "0", role: "region", "aria-label": label },
      this.table);
    this.node = element("div", { class: "sortable" }, box, element("p", { class: "note" }, this.rest));
    this.show();
  }

  heading(column, at) {
    const mark = element("span", { class: "mark", "aria-hidden": "true" });
    const unitOf = column.unit ? element("span", { class: "unit" }, `, ${column.unit}`) : null;
    const parts = column.kind === "text" ? [column.label, unitOf, mark] : [mark, column.label, unitOf];
    const button = element("button", { type: "button", onclick: () => this.sortBy(at) }, ...parts.filter(Boolean));
    return element("th", { scope: "col", class: column.kind === "text" ? null : "number" }, button);
  }

  /** Sort by a column or, if sorted by it, change the direction. */
  sortBy(at) {
    const ways = this.columns[at].kind === "text" ? ["ascending", "descending", "none"] : ["descending", "ascending", "none"];
    const before = this.sorted.column === at ? ways.indexOf(this.sorted.way) : -1;
    this.sorted = { column: at, way: ways[(before + 1) % 3] };
    this.show();
  }

  /** Show only the rows for which a test is true. */
  filter(wanted) {
    this.kept = this.order.filter(wanted);
    this.show();
  }

  show() {
    const { column, way } = this.sorted;
    this.rows = this.kept.slice();
    this.headings.forEach((heading, at) => {
      const is = at === column && way !== "none";
      if (is) heading.setAttribute("aria-sort", way);
      else heading.removeAttribute("aria-sort");
      heading.querySelector(".mark").textContent = is ? (way === "ascending" ? "↑" : "↓") : "";
    });
    if (way !== "none") {
      const sign = way === "ascending" ? 1 : -1, { value } = this.columns[column];
      const keys = new Map(this.rows.map((row) => [row, value(row)]));
      const words = new Intl.Collator("en", { numeric: true });
      this.rows.sort((one, other) => {
        const [a, b] = [keys.get(one), keys.get(other)];
        if (a === null || b === null) return (a === null) - (b === null) || one - other;  // what there is not comes last
        return sign * (typeof a === "string" ? words.compare(a, b) : a - b) || one - other;
      });
    }
    this.shown = 0;
    this.body.replaceChildren();
    this.showMore();
  }

  showMore() {
    const next = this.rows.slice(this.shown, this.shown + (this.shown ? ROWS_AT_ONCE : this.atFirst));
    this.body.append(...next.map((row) => this.row(row)));
    this.shown += next.length;
    const left = this.rows.length - this.shown;
    this.rest.parentNode.hidden = left === 0;
    this.rest.textContent = `Show ${Math.min(left, ROWS_AT_ONCE)} more${left > ROWS_AT_ONCE ? ` of ${left.toLocaleString("en")}` : ""}`;
  }

  row(row) {
    const cells = this.columns.map((column, at) => {
      const text = column.text ? column.text(row) : "";
      const kind = column.kind === "text" ? (at ? "words" : null) : "number";
      const isZero = column.kind === "number" && (text === "0" || text === "-");
      const inside = column.node ? column.node(row) : shortened(text);
      const cell = element(at ? "td" : "th", { scope: at ? null : "row", class: [kind, isZero && "zero"].filter(Boolean).join(" ") || null,
        title: column.kind === "text" && text.length > 24 ? text : null });
      if (at === 0 && this.pick) {
        cell.append(element("button", { type: "button" }, inside));
      } else {
        cell.append(inside);
      }
      if (at === 0 && this.depths.length && this.sorted.way === "none") cell.style.paddingLeft = `${0.75 + this.depths[row]}rem`;
      return cell;
    });
    const made = element("tr", this.pick ? { class: "pick", "data-row": row, onclick: () => this.choose(row) } : {}, ...cells);
    if (row === this.picked) made.setAttribute("aria-selected", "true");
    return made;
  }

  choose(row, picks = true) {
    this.picked = row;
    for (const made of this.body.children) {
      if (Number(made.dataset.row) === row) made.setAttribute("aria-selected", "true");
      else made.removeAttribute("aria-selected");
    }
    if (picks) this.pick(row);
  }
}

/** Return a column of texts. `value` returns the text of a row. */
const textColumn = (label, value) => ({ label, kind: "text", value, text: value });

/** Return a column of times. `value` returns the time of a row in ns. */
const timeColumn = (label, value) => ({ label, unit, kind: "time", value, text: (row) => compact(value(row) / unitNs) });

/** Return the table of a view. Its cells are texts, or pairs of a number and its text. */
function viewTable(data) {
  const columns = data.columns.map((column, at) => (column.kind === "text" ? textColumn(column.label, (row) => data.rows[row][at])
    : { ...column, value: (row) => data.rows[row][at][0], text: (row) => data.rows[row][at][1] }));
  const made = new SortableTable({ label: data.title, columns, count: data.rows.length, depths: data.depths,
    atFirst: ROWS_OF_A_VIEW });
  return element("div", { class: "view-table" }, element("h3", {}, data.title), made.node,
    data.note ? element("p", { class: "note" }, data.note) : null);
}

/** Show the views, one at a time, and the reason for each empty view. */
function startViews() {
  const full = report.views.filter((view) => view.tables.length);
  const tabs = byId("view-tabs"), panel = byId("view-panel");
  function open(name, focus = false) {
    const view = full.find((one) => one.name === name);
    for (const tab of tabs.children) {
      const is = tab.dataset.view === name;
      tab.setAttribute("aria-selected", String(is));
      tab.tabIndex = is ? 0 : -1;
      if (is && focus) tab.focus();
      if (is) panel.setAttribute("aria-labelledby", tab.id);
    }
    panel.replaceChildren(element("p", { class: "note" }, `${view.about}.`), ...view.tables.map(viewTable),
      ...(view.more ? [element("p", { class: "note" }, view.more)] : []));
  }
  for (const view of full) {
    tabs.append(element("button", { type: "button", role: "tab", id: `tab-${view.name}`, "data-view": view.name,
      "aria-controls": "view-panel", onclick: () => open(view.name) }, view.name));
  }
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const names = full.map((view) => view.name), at = names.indexOf(event.target.dataset.view);
    open(names[(at + step + names.length) % names.length], true);
    event.preventDefault();
  });
  if (full.length) open(full[0].name);
  else {
    tabs.remove();
    panel.replaceChildren(element("p", { class: "empty" }, "No view has anything to show of this trace; below each says why."));
  }
  const empty = report.views.filter((view) => !view.tables.length);
  if (empty.length) {
    const list = element("dl");
    for (const view of empty) list.append(element("dt", {}, view.name), element("dd", {}, view.why));
    byId("views-empty").append(element("details", { open: !full.length },
      element("summary", {}, `${counted(empty.length, "view")} with nothing to show, and why`), list));
  }
}
