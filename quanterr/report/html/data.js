// The layers of the report: unpacked from the page, in columns.

const DIFFERS = 0;
const CHANGED = 1; // one-dimensional: a norm, a bias
const IDENTICAL = 2;
const NOT_COMPARED = 3;
const STATUSES = ["differ", "norms, biases", "identical", "not compared"];
const SAME = "="; // in the place of a number of a layer that is as in the original

/** The JSON that is packed (deflate, base64) in a script element. */
async function unpacked(script) {
  const bytes = Uint8Array.from(atob(JSON.parse(script.textContent)), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

/** Columns with an entry for each layer: words looked up; undefined numbers NaN, and infinite where nothing differs. */
function layersOf(report) {
  const { columns, words } = report;
  const column = (key) => columns[key] ?? []; // without a layer there are none
  const looked = (key) => column(key).map((id) => (id < 0 ? null : words[key][id]));
  const number = (value) => (value === SAME ? Infinity : (value ?? NaN));
  const names = namesOf(report);
  return {
    n: names.length,
    name: names,
    lower: names.map((name) => name.toLowerCase()),
    status: Uint8Array.from(columns.status),
    block: Int32Array.from(columns.block),
    ...Object.fromEntries(Object.keys(words).map((key) => [key, looked(key)])),
    ...Object.fromEntries(Object.keys(METRICS).map((key) => [key, Float64Array.from(column(key), number)])),
  };
}

/** Names are stored as a pattern and the numbers in it. */
function namesOf({ patterns, numbers, columns }) {
  const pieces = patterns.map((pattern) => pattern.split("\0"));
  let at = 0;
  return columns.pattern.map((id) => {
    const [first, ...rest] = pieces[id];
    return rest.reduce((name, piece) => name + numbers[at++] + piece, first);
  });
}

/** How bad a layer is by a metric: what was not compared is worst, then what is undefined; the same is best. */
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

/** 0 only for exactly 0; never rounded to nothing. */
function scientific(value) {
  return value === 0 ? "0" : value.toExponential(3).replace("e+", "e");
}

function percent(value, digits) {
  const text = (100 * value).toPrecision(digits);
  return text.includes("e") ? scientific(100 * value) : value === 0 ? "0" : text;
}

function counted(n, one, many = `${one}s`) {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
}

function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = bytes ? Math.min(Math.floor(Math.log2(Math.abs(bytes)) / 10), units.length - 1) : 0;
  return `${Number((bytes / 1024 ** power).toPrecision(4))} ${units[power]}`;
}
