// Size against SNR: a point for each candidate, and a line through the Pareto-optimal ones.

const PLOT = { height: 300, left: 62, right: 24, top: 22, bottom: 44 }; // pixels
const POINT_LABEL = { character: 7.5, height: 13 }; // pixels, of the names of points
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
  const placed = [];
  const taken = []; // boxes of dots and labels
  for (const p of points) taken.push({ left: x(p.bytes) - 7, right: x(p.bytes) + 7, top: y(p.snr_db) - 7, bottom: y(p.snr_db) + 7 });
  for (const p of points) placed.push(pointOf(svg, p, x, y, labelOf(p, x, y, width, taken), choose));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const focused = svg.contains(document.activeElement) ? document.activeElement.dataset.n : null;
  svg.replaceChildren(...grid, ...ends, shape(svg, "path", { class: "curve", d: `M${line}` }), ...placed);
  if (focused !== null) svg.querySelector(`[data-n="${focused}"]`)?.focus();
}

/** Return the first place of a label, near to far from its dot, that no dot and no other label takes. */
function labelOf(point, x, y, width, taken) {
  const [px, py] = [x(point.bytes), y(point.snr_db)];
  const long = point.name.length * POINT_LABEL.character;
  const right = { late: false, dx: 12, dy: 18 }, left = { late: true, dx: -12, dy: -6 };
  const sides = px > width / 2 ? [left, right] : [right, left]; // clear of the line, which rises to the right
  const near = sides.flatMap(({ late, dx, dy }) => [dy, -dy + 12, dy + 18, dy - 18, dy + 36, dy - 36].map((down) => ({ late, x: px + dx, y: py + down })));
  const boxOf = (at) => ({ left: at.late ? at.x - long : at.x, right: at.late ? at.x : at.x + long, top: at.y - POINT_LABEL.height, bottom: at.y + 3 });
  const isFree = (at) => {
    const own = boxOf(at);
    const isInside = own.left >= 0 && own.right <= width && own.top >= 0 && own.bottom <= PLOT.height - PLOT.bottom;
    return isInside && !taken.some((one) => own.left < one.right && one.left < own.right && own.top < one.bottom && one.top < own.bottom);
  };
  const found = near.find(isFree) ?? near[0];
  taken.push(boxOf(found));
  return found;
}

function pointOf(svg, point, x, y, at, choose) {
  const [px, py] = [x(point.bytes), y(point.snr_db)];
  const label = `${point.name}: ${bytesText(point.bytes)}, ${point.snr_db.toFixed(2)} dB${point.on_front ? "" : ", not Pareto-optimal"}`;
  const button = shape(
    svg, "g", { class: "point", role: "button", tabindex: "0", "aria-label": label, "data-n": point.n },
    shape(svg, "circle", { class: `dot${point.on_front ? "" : " behind"}`, cx: px, cy: py, r: 6 }),
    shape(svg, "text", { class: at.late ? "end" : null, x: at.x, y: at.y }, point.name),
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
