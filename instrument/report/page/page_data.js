// The document of the page, and its columns of numbers as `varints.py` writes them.

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
