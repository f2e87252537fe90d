// Size against SNR: a point for each candidate, and a line through the Pareto-optimal ones.

const PLOT = { height: 300, left: 62, right: 24, top: 22, bottom: 44 }; // pixels
const MARGIN = 0.12; // on each side, relative to the range

/** Draw the plot; `choose(n)` is called with the index of a selected candidate. */
function frontPlot(svg, candidates, choose) {
  const points = candidates.map((candidate, n) => ({ ...candidate, n })).filter(({ snr_db }) => snr_db !== null);
  if (points.length < 2) return;
  byId("front").hidden = false;
  const draw = () => drawFront(svg, points, choose);
  new ResizeObserver(draw).observe(svg);
  draw();
}

function drawFront(svg, points, choose) {
  const width = Math.max(svg.clientWidth, 240);
  const { height, left, right, top, bottom } = PLOT;
  const [fromBytes, toBytes] = widen(extremes(points.map(({ bytes }) => bytes)));
  const [fromDb, toDb] = widen(extremes(points.map(({ snr_db }) => snr_db)));
  const x = (bytes) => left + ((bytes - fromBytes) / (toBytes - fromBytes)) * (width - left - right);
  const y = (db) => height - bottom - ((db - fromDb) / (toDb - fromDb)) * (height - top - bottom);
  const front = points.filter(({ on_front }) => on_front).sort((a, b) => a.bytes - b.bytes);
  const line = front.map(({ bytes, snr_db }) => `${x(bytes).toFixed(1)} ${y(snr_db).toFixed(1)}`).join("L");
  const step = niceStep((toDb - fromDb) / 5, false);
  const grid = [];
  for (let level = Math.ceil(fromDb / step) * step; level <= toDb; level += step) {
    grid.push(shape(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y(level), y2: y(level) }));
    grid.push(shape(svg, "text", { class: "tick end", x: left - 8, y: y(level) + 4 }, `${Number(level.toFixed(3))} dB`));
  }
  const ends = [fromBytes, toBytes].map((bytes, n) =>
    shape(svg, "text", { class: n ? "tick end" : "tick", x: x(bytes), y: height - bottom + 20 }, bytesText(bytes)),
  );
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const focused = svg.contains(document.activeElement) ? document.activeElement.dataset.n : null;
  svg.replaceChildren(...grid, ...ends, shape(svg, "path", { class: "curve", d: `M${line}` }), ...points.map((p) => pointOf(svg, p, x, y, width, choose)));
  if (focused !== null) svg.querySelector(`[data-n="${focused}"]`)?.focus();
}

function pointOf(svg, point, x, y, width, choose) {
  const [px, py] = [x(point.bytes), y(point.snr_db)];
  const label = `${point.name}: ${bytesText(point.bytes)}, ${point.snr_db.toFixed(2)} dB${point.on_front ? "" : ", not Pareto-optimal"}`;
  const late = px > width / 2; // labels stay clear of the line, which rises to the right
  const button = shape(
    svg, "g", { class: "point", role: "button", tabindex: "0", "aria-label": label, "data-n": point.n },
    shape(svg, "circle", { class: `dot${point.on_front ? "" : " behind"}`, cx: px, cy: py, r: 6 }),
    shape(svg, "text", { class: late ? "end" : null, x: late ? px - 12 : px + 12, y: late ? py - 6 : py + 18 }, point.name),
  );
  button.addEventListener("click", () => choose(point.n));
  button.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    choose(point.n);
  });
  return button;
}

function widen([low, high]) {
  const by = (high - low) * MARGIN || Math.abs(low) * MARGIN || 1;
  return [low - by, high + by];
}
