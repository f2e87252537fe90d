// Layers to keep unquantized: the error that the first n of them remove, and their cost in bytes.

const CURVE = { height: 180, side: 8, top: 8, bottom: 20 }; // pixels

/** Return the layers at the first n rows in the words of a program: a list, or a complete command (kept_commands.py). */
function writeList(words, layers, keep, n) {
  const kept = new Set(keep.rows.slice(0, n));
  const rows = words.quantized?.filter((row) => !kept.has(row)) ?? [...kept];
  const names = words.own_names?.slice(0, n) ?? rows.map((row) => layers.name[row]);
  const list = names.map((name) => {
    const parts = { name, module: name.replace(/\.weight$/, ""), pattern: escapeRegex(name) };
    return words.word.replace(/\{(\w+)\}/g, (_, part) => parts[part]);
  });
  return words.start + list.join(words.between) + words.end;
}

function escapeRegex(name) {
  return name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&").replaceAll("'", "'\\''");
}

/** Fill the section; `pick(text, rows)` shows the kept layers in the table. */
function showKeep(layers, keep, pick) {
  if (!keep.rows.length || !byId("keep")) return; // a faultless file's page has no such section
  byId("keep").hidden = false;
  const left = runningTotals(keep.shares).map((share) => Math.max(1 - share, 0));
  const added = runningTotals(keep.added);
  const range = byId("keep-range");
  range.max = `${keep.rows.length}`;
  fillSelect(byId("keep-syntax"), keep.programs.map(({ program }) => [program, program]));
  const curves = [
    new Curve(byId("keep-layers"), left.map((_, n) => n), left, (n) => formatCount(n, "layer")),
    new Curve(byId("keep-bytes"), added, left, (n) => `+${bytesText(added[n])}`),
  ];
  const show = () => {
    const n = Number(range.value);
    range.setAttribute("aria-valuetext", formatCount(n, "layer"));
    for (const curve of curves) curve.mark(n);
    byId("keep-answer").replaceChildren(...answerOf(layers, keep, n, left[n], added[n], pick));
    const words = keep.programs.find(({ program }) => program === byId("keep-syntax").value);
    byId("keep-list").value = n ? writeList(words, layers, keep, n) : "";
    byId("keep-kind").textContent = words.is_command ? "Command of" : "List for";
    byId("keep-copy").textContent = words.is_command ? "Copy command" : "Copy list";
  };
  for (const curve of curves) {
    curve.choose = (n) => {
      range.value = `${n}`;
      show();
    };
  }
  range.addEventListener("input", show);
  byId("keep-syntax").addEventListener("change", show);
  byId("keep-copy").addEventListener("click", ({ target }) => copy(byId("keep-list").value, target));
  const notes = [
    keep.bound ? `${formatCount(keep.bound, "layer")} left out: not finite, or with scales in another tensor.` : "",
    "Names longer than 200 characters are cut.",
  ];
  byId("keep-note").textContent = layers.name.some((name) => name.length >= 200) ? notes.join(" ") : notes[0];
  range.value = `${keep.proposed}`;
  show();
}

/** Return a sentence about n kept layers, and a button that shows them. */
function answerOf(layers, keep, n, left, added, pick) {
  if (!n) return ["No layer kept. If few layers made most of the error, they would be proposed here."];
  const error = `${Number((100 * (1 - left)).toPrecision(3))} %`;
  const bytes = Number(((100 * Math.abs(added)) / keep.bytes).toPrecision(3));
  const grows = added < 0 ? "shrinks" : "grows";
  const snr = keep.snr_db === null || left <= 1e-9 ? "" : `, SNR ${keep.snr_db.toFixed(2)} → ${(keep.snr_db - 10 * Math.log10(left)).toFixed(2)} dB`;
  const kept = keep.dtype ? ` in ${keep.dtype}` : " as in the original";
  const makes = n === 1 ? "makes" : "make";
  const text = `${formatCount(n, "layer")} ${makes} ${error} of the error. Kept${kept}, the file ${grows} by ${bytes} % (${bytesText(Math.abs(added))})${snr}. `;
  const button = element("button", { type: "button" }, n === 1 ? "Show it" : "Show them");
  button.addEventListener("click", () => pick(`the ${n} to keep`, keep.rows.slice(0, n)));
  return [text, button];
}

/** Return 0 and the running sums of the values. */
function runningTotals(values) {
  let total = 0;
  return [0, ...values.map((value) => (total += value))];
}

/** A falling curve over 0 … n layers; a click selects the nearest number. */
class Curve {
  constructor(svg, xs, ys, label) {
    Object.assign(this, { svg, xs, ys, label, n: 0 });
    svg.addEventListener("click", ({ clientX }) => this.choose(this.nearest(clientX)));
    new ResizeObserver(() => this.draw()).observe(svg);
  }

  draw() {
    const { svg, xs, ys, label } = this;
    const { height, side, top, bottom } = CURVE;
    const width = Math.max(svg.clientWidth, 120); // one unit per pixel keeps the size of texts
    const base = height - bottom;
    const most = xs.at(-1) || 1;
    this.at = xs.map((x, n) => [side + (x / most) * (width - 2 * side), top + (1 - ys[n]) * (base - top)]);
    const line = this.at.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
    const [x, y] = this.at[this.n];
    const late = x > width / 2;
    const remains = `${label(this.n)}: ${Number((100 * ys[this.n]).toPrecision(3))} % remains`;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", remains);
    svg.replaceChildren(
      shape(svg, "path", { class: "area", d: `M${line}L${this.at.at(-1)[0].toFixed(1)} ${base}L${side} ${base}Z` }),
      shape(svg, "path", { class: "curve", d: `M${line}` }),
      shape(svg, "text", { class: "tick", x: side, y: height - 5 }, label(0)),
      shape(svg, "text", { class: "tick end", x: width - side, y: height - 5 }, label(xs.length - 1)),
      shape(svg, "line", { class: "cross", x1: x, x2: x, y1: top, y2: base }),
      shape(svg, "circle", { class: "dot", cx: x, cy: y, r: 5 }),
      shape(svg, "text", { class: late ? "end" : null, x: late ? x - 8 : x + 8, y: top + 14 }, remains),
    );
  }

  nearest(clientX) {
    const x = clientX - this.svg.getBoundingClientRect().left;
    return this.at.reduce((best, [px], n) => (Math.abs(px - x) < Math.abs(this.at[best][0] - x) ? n : best), 0);
  }

  mark(n) {
    this.n = n;
    this.draw();
  }
}
