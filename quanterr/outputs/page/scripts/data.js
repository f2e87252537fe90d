// The layers of a report, unpack from the page into columns.

const DIFFERS = 0;
const CHANGED = 1; // 1-D: a norm or a bias
const IDENTICAL = 2;
const NOT_COMPARED = 3;
const STATUSES = ["differ", "norms, biases", "identical", "not compared"];
const SAME = "="; // stands for the number of a layer that equals the original

/** Return the JSON packed (deflate, base64) into a script element. */
async function unpack(script) {
  const bytes = Uint8Array.from(atob(JSON.parse(script.textContent)), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

/** Return columns with an entry for each layer: words resolved, undefined numbers NaN, identical layers Infinity. */
function layersOf(report) {
  const { columns, words } = report;
  const column = (key) => columns[key] ?? []; // missing if there are no layers
  const looked = (key) => column(key).map((id) => (id < 0 ? null : words[key][id]));
  const number = (value) => (value === SAME ? Infinity : (value ?? NaN));
  const names = namesOf(report);
  return {
    n: names.length,
    name: names,
    common: commonPrefix(names),
    lower: names.map((name) => name.toLowerCase()),
    status: Uint8Array.from(columns.status),
    block: Int32Array.from(columns.block),
    ...Object.fromEntries(Object.keys(words).map((key) => [key, looked(key)])),
    ...Object.fromEntries(Object.keys(METRICS).map((key) => [key, Float64Array.from(column(key), number)])),
  };
}

/** Return the names, which are stored as a pattern and its numbers. */
function namesOf({ patterns, numbers, columns }) {
  const pieces = patterns.map((pattern) => pattern.split("\0"));
  let at = 0;
  return columns.pattern.map((id) => {
    const [first, ...rest] = pieces[id];
    return rest.reduce((name, piece) => name + numbers[at++] + piece, first);
  });
}

/** Return the words, each with its dot, with which all names begin. */
function commonPrefix(names) {
  let words = (names[0] ?? "").split(".").slice(0, -1);
  for (const name of names) {
    const own = name.split(".");
    const differs = words.findIndex((word, n) => word !== own[n] || n === own.length - 1);
    if (differs >= 0) words = words.slice(0, differs);
  }
  return words.map((word) => `${word}.`).join("");
}

/** Return how bad a layer is by a metric: not compared is worst, then undefined; identical is best. */
function badness(layers, metric, i) {
  if (layers.status[i] === NOT_COMPARED) return Infinity;
  if (layers.status[i] === IDENTICAL) return -Infinity;
  const value = layers[metric][i];
  if (Number.isNaN(value)) return Number.MAX_VALUE;
  return METRICS[metric].better === "higher" ? -value : value;
}

function withUnit(metric, value) {
  const { show, unit } = METRICS[metric];
  if (value === Infinity) return "identical";
  return unit ? `${show(value)} ${unit}` : show(value);
}

/** Format in exponential form; "0" only for exactly 0. */
function scientific(value) {
  return value === 0 ? "0" : value.toExponential(3).replace("e+", "e");
}

function percent(value, digits) {
  const text = (100 * value).toPrecision(digits);
  return text.includes("e") ? scientific(100 * value) : value === 0 ? "0" : text;
}

function formatCount(n, one, many = `${one}s`) {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
}

function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = bytes ? Math.min(Math.floor(Math.log2(Math.abs(bytes)) / 10), units.length - 1) : 0;
  return `${Number((bytes / 1024 ** power).toPrecision(4))} ${units[power]}`;
}
