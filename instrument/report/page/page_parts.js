// The document of the page, and its columns of numbers as `varints` writes them.

/** What the page shows: JSON, deflated, in base64. */
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

/** The numbers of a column: seven bits a byte, the lowest first, the sign in the lowest bit of all. */
function numbersOf(text) {
  const bytes = atob(text || "");
  const found = [];
  let value = 0, scale = 1;
  for (let at = 0; at < bytes.length; at++) {
    const byte = bytes.charCodeAt(at);
    value += (byte & 127) * scale;
    if (byte & 128) {
      scale *= 128;
      continue;
    }
    found.push(value % 2 ? -(value + 1) / 2 : value / 2);
    value = 0;
    scale = 1;
  }
  return Float64Array.from(found);
}

/** The numbers of a column that was written by their differences. */
function summedNumbersOf(text) {
  const found = numbersOf(text);
  for (let at = 1; at < found.length; at++) found[at] += found[at - 1];
  return found;
}

/** Where the numbers of each of some groups begin, and at last where they end. */
function beginsOf(counts) {
  const begins = new Float64Array(counts.length + 1);
  for (let at = 0; at < counts.length; at++) begins[at + 1] = begins[at] + counts[at];
  return begins;
}

/** All the columns of an object, by name; those of `summed` by their differences. */
function columnsOf(object, names, summed = []) {
  const found = {};
  for (const name of names) found[name] = (summed.includes(name) ? summedNumbersOf : numbersOf)(object[name]);
  return found;
}

// What all parts of the page share: elements, numbers as text, colours, the tip, the theme.

/** An element with attributes, listeners (`on...`), and children, of which texts stay texts. */
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

/** A number; one half way between two of so many digits (0: two whole ones) goes to the even one, as Python rounds. */
function halfToEven(value, digits) {
  const [mantissa, exponent] = Math.abs(value).toExponential(60).split("e");
  const all = mantissa.replace(".", ""), kept = digits || Number(exponent) + 1;
  return kept > 0 && /^50+$/.test(all.slice(kept)) && Number(all[kept - 1]) % 2 === 0 ? value * (1 - 1e-15) : value;
}

/** Four significant digits in at most seven columns, as `compact` of report/table.py has it. */
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

/** A time in the page's unit, with it. */
const timeText = (ns) => `${unit === "ns" ? Math.round(ns) : compact(ns / unitNs)} ${unit}`;

/** A share in tenths of a per cent. */
const shareText = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)}%` : "-");

const counted = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;

// Colours

const OWN_COLOURS = 6;
const PART_COLOURS = {
  queue: "queue", stall: "stall", transport: "transport", unknown: "unknown", "share of batches": "share",
  "waiting in batches": "waiting",
};
const colourOfPart = new Map();
let ownParts = 0;

/** The name of the colour of a part of requests: those of the ledger have their own, phases take turns. */
function partColour(name) {
  if (!colourOfPart.has(name)) {
    const own = Object.hasOwn(PART_COLOURS, name) ? PART_COLOURS[name] : null;
    colourOfPart.set(name, own ?? `own-${(ownParts++ % OWN_COLOURS) + 1}`);
  }
  return colourOfPart.get(name);
}

/** The colour of a kind of spans has its name: `page.css` alone lists them. */
const kindColour = (kind) => (colour(kind) ? kind : "user");

let colours = new Map();
/** The value of a colour in the theme that is on. */
function colour(name) {
  if (!colours.has(name)) {
    colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  }
  return colours.get(name);
}

/** The colour of text on another one: those that stand back are dark in the dark. */
const inkOn = (name) => (name === "unknown" || name === "waiting" ? "ink" : "bar-ink");

function swatch(name) {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = `var(--${name})`;
  return made;
}

/** A bar of the parts of a whole, `[name, share, text]` each, to be read as one text. */
function stack(parts, size = "") {
  const told = parts.filter(([, ratio]) => ratio > 0);
  const label = told.map(([name, ratio, text]) => `${name} ${text ?? shareText(ratio, 1)}`).join(", ");
  const made = element("div", { class: `stack ${size}`, role: "img", "aria-label": label });
  for (const [name, ratio, text] of told) {
    const part = element("span", {});
    part.style.width = `${100 * ratio}%`;
    part.style.background = `var(--${partColour(name)})`;
    if (!size) withTip(part, () => [name, [["share", text ?? shareText(ratio, 1)]]]);
    made.append(part);
  }
  return made;
}

// The tip

const tip = byId("tip");

/** Show `[title, [[name, value], ...]]` beside a point of the window. */
function showTip(told, x, y) {
  const [title, facts] = told;
  tip.replaceChildren(element("b", {}, title), factsList(facts));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
}

function hideTip() {
  tip.hidden = true;
}

function withTip(target, tell) {
  target.addEventListener("pointermove", (event) => showTip(tell(), event.clientX, event.clientY));
  target.addEventListener("pointerleave", hideTip);
}

function factsList(facts) {
  const list = element("dl");
  for (const [name, value] of facts) list.append(element("dt", {}, name), element("dd", {}, value));
  return list;
}

addEventListener("scroll", hideTip, { passive: true });

// The theme

const themeListeners = [];
const systemTheme = matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";

function applyTheme() {
  const shown = theme === "auto" ? (systemTheme.matches ? "dark" : "light") : theme;
  document.documentElement.dataset.theme = shown;
  colours = new Map();
  for (const button of byId("theme").children) button.setAttribute("aria-pressed", String(button.dataset.theme === theme));
  for (const listener of themeListeners) listener();
}

function startTheme() {
  try {
    theme = localStorage.getItem("instrument-theme") ?? "auto";
  } catch {
    // A browser that keeps nothing for files: the system's theme it is.
  }
  if (!["auto", "light", "dark"].includes(theme)) theme = "auto";
  byId("theme").addEventListener("click", (event) => {
    const chosen = event.target.dataset?.theme;
    if (!chosen) return;
    theme = chosen;
    try {
      localStorage.setItem("instrument-theme", theme);
    } catch {
      // As above.
    }
    applyTheme();
  });
  systemTheme.addEventListener("change", applyTheme);
  applyTheme();
}
