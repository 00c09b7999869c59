// Tables that are sorted by a click on a heading: first the way that is mostly wanted, then the other, then as they came.

const ROWS_AT_ONCE = 100, ROWS_OF_A_VIEW = 25, NAME_CHARACTERS = 63;

/** A text whose middle gives way where it is long: paths differ in their ends. */
const shortened = (text) => (text.length <= NAME_CHARACTERS ? text
  : `${text.slice(0, NAME_CHARACTERS / 3)}…${text.slice(1 + NAME_CHARACTERS / 3 - NAME_CHARACTERS)}`);

/**
 * A table of `count` rows. A column has a `label`, perhaps a `unit`, its `kind`, the `value` of a row to sort by (null for
 * none) and its `text`, or a `node`. `pick` is called with the row that was chosen, and `more` rows are shown on demand.
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

  /** Sort by a column, or by it in the next way. */
  sortBy(at) {
    const ways = this.columns[at].kind === "text" ? ["ascending", "descending", "none"] : ["descending", "ascending", "none"];
    const before = this.sorted.column === at ? ways.indexOf(this.sorted.way) : -1;
    this.sorted = { column: at, way: ways[(before + 1) % 3] };
    this.show();
  }

  /** Show the rows that a test is true of. */
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

  choose(row, tell = true) {
    this.picked = row;
    for (const made of this.body.children) {
      if (Number(made.dataset.row) === row) made.setAttribute("aria-selected", "true");
      else made.removeAttribute("aria-selected");
    }
    if (tell) this.pick(row);
  }
}

/** A table of a view: its cells are texts, or a number and its text. */
function viewTable(told) {
  const columns = told.columns.map((column, at) => {
    const isText = column.kind === "text";
    return {
      ...column,
      value: (row) => (isText ? told.rows[row][at] : told.rows[row][at][0]),
      text: (row) => (isText ? told.rows[row][at] : told.rows[row][at][1]),
    };
  });
  const made = new SortableTable({ label: told.title, columns, count: told.rows.length, depths: told.depths,
    atFirst: ROWS_OF_A_VIEW });
  return element("div", { class: "view-table" }, element("h3", {}, told.title), made.node,
    told.note ? element("p", { class: "note" }, told.note) : null);
}

/** The views, one at a time, and why the others are empty. */
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
