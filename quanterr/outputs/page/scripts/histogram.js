// Histogram of layers by SNR: a strip for each format, over the same axis.

const MAX_STRIPS = 8;
const BARS = 48; // approximate number

/** Draw the strips; `pick(text, rows)` is called with the layers of a selected bar. */
function histograms(layers, usual, pick) {
  const rows = Array.from({ length: layers.n }, (_, i) => i).filter((i) => layers.status[i] === DIFFERS);
  const defined = rows.map((i) => layers.snr_db[i]).filter((value) => !Number.isNaN(value));
  if (!rows.length) return;
  byId("distribution").hidden = false;
  const axis = axisOf(defined.length ? extremes(defined) : [0, 1]);
  const strips = stripsOf(layers, rows).map(([format, its]) => stripOf(layers, format, its, axis, usual[format], pick));
  byId("histograms").replaceChildren(...strips.flat(), axisElement(axis));
}

/** Return formats with their layers, the most frequent first; rare ones are merged. */
function stripsOf(layers, rows) {
  const found = new Map();
  for (const i of rows) {
    const format = layers.format[i];
    if (!found.has(format)) found.set(format, []);
    found.get(format).push(i);
  }
  const strips = [...found].sort(([, a], [, b]) => b.length - a.length);
  if (strips.length <= MAX_STRIPS) return strips;
  const rest = strips.slice(MAX_STRIPS - 1);
  return [...strips.slice(0, MAX_STRIPS - 1), [`${rest.length} others`, rest.flatMap(([, its]) => its)]];
}

/** Return bars of a round width that cover the range. */
function axisOf([low, high]) {
  const width = Math.max(niceStep((high - low) / BARS, false), 0.05);
  const first = Math.floor(low / width - 1);
  const bars = Math.max(Math.floor(high / width) - first + 2, 10);
  return { width, first, bars, from: first * width, to: (first + bars) * width };
}

function stripOf(layers, format, rows, axis, usual, pick) {
  const bars = Array.from({ length: axis.bars }, () => []);
  const undefinedOnes = [];
  for (const i of rows) {
    if (Number.isNaN(layers.snr_db[i])) undefinedOnes.push(i);
    else bars[Math.floor(layers.snr_db[i] / axis.width) - axis.first].push(i);
  }
  const strip = element("div", { class: "bars", role: "group", "aria-label": `SNR of the layers in ${format}` });
  if (usual) strip.append(usualBand(axis, usual));
  if (undefinedOnes.length) strip.append(barOf(format, undefinedOnes, "undefined", rows.length, pick));
  bars.forEach((its, n) => {
    const from = (axis.first + n) * axis.width;
    strip.append(barOf(format, its, `${formatTick(from)} to ${formatTick(from + axis.width)} dB`, rows.length, pick));
  });
  strip.querySelector("button:not(:disabled)")?.setAttribute("tabindex", "0");
  addRovingFocus(strip, "button", (bar, key) => {
    const usable = [...strip.querySelectorAll("button:not(:disabled)")];
    const by = { ArrowLeft: -1, ArrowRight: 1 }[key];
    return by ? usable[usable.indexOf(bar) + by] : null;
  });
  const notes = [formatCount(rows.length, "layer"), usual ? `usual ${usual[0]} to ${usual[1]} dB` : ""].filter(Boolean);
  const label = element("div", { class: "strip-label" }, element("b", {}, format), element("span", {}, notes.join(", ")));
  return [label, strip];
}

function barOf(format, rows, range, all, pick) {
  const name = `${format}, ${range}: ${formatCount(rows.length, "layer")}`;
  const bar = element("button", { type: "button", tabindex: "-1", "aria-label": name, disabled: rows.length ? false : "" });
  if (range === "undefined") bar.classList.add("undefined");
  if (!rows.length) return bar;
  const height = element("i");
  height.style.height = `${(100 * Math.log1p(rows.length)) / Math.log1p(all)}%`;
  bar.append(height);
  const showName = () => (byId("bar-readout").textContent = name);
  bar.addEventListener("mouseenter", showName);
  bar.addEventListener("focus", showName);
  bar.addEventListener("click", () => pick(`${format}, ${range}`, rows));
  return bar;
}

function usualBand(axis, [low, high]) {
  const share = (value) => Math.min(Math.max((100 * (value - axis.from)) / (axis.to - axis.from), 0), 100);
  const band = element("div", { class: "usual" });
  band.style.left = `${share(low)}%`;
  band.style.width = `${share(high) - share(low)}%`;
  band.hidden = share(high) === share(low);
  return band;
}

function axisElement(axis) {
  const step = niceStep((axis.to - axis.from) / 10, false);
  const made = element("div", { class: "axis", "aria-hidden": "true" });
  for (let n = Math.ceil(axis.from / step); n * step <= axis.to; n++) {
    const share = (n * step - axis.from) / (axis.to - axis.from);
    if (share < 0.03 || share > 0.97) continue; // it would extend beyond the page
    const tick = element("span", {}, `${formatTick(n * step)} dB`);
    tick.style.left = `${100 * share}%`;
    made.append(tick);
  }
  return made;
}

function formatTick(value) {
  return `${Number(value.toFixed(2))}`;
}
