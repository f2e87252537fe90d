// Maps numbers to nine colours, h0 (best) to h8 (worst).

const COLOURS = 9;

/** Return a scale over the finite values with round bounds; a colour is the number of steps from the best. */
function scaleOf(metric, values) {
  const { better, log = false, step = 0 } = METRICS[metric];
  const position = (value) => (log ? Math.log10(value) : value);
  const finite = values.map(position).filter(Number.isFinite);
  const [low, high] = extremes(finite);
  const width = Math.max(niceStep((high - low) / (COLOURS - 1), log), log ? 0.25 : step);
  const worstIsHigh = better === "lower";
  const best = worstIsHigh ? Math.floor(low / width) : Math.ceil(high / width) - 1;
  const last = Math.min(Math.abs((worstIsHigh ? Math.floor(high / width) : Math.floor(low / width)) - best), COLOURS - 1);
  const colour = (value) => {
    const at = position(value);
    const steps = worstIsHigh ? Math.floor(at / width) - best : best - Math.floor(at / width);
    return Math.min(Math.max(steps, 0), COLOURS - 1);
  };
  const bound = (n) => (log ? 10 ** (n * width) : n * width);
  const label = (n) => {
    const [from, to] = worstIsHigh ? [best + n, best + n + 1] : [best - n, best - n + 1];
    const text = (edge) => boundText(metric, bound(edge));
    const unit = METRICS[metric].unit && ` ${METRICS[metric].unit}`;
    if (n === last && last > 0) return worstIsHigh ? `from ${text(from)}${unit}` : `below ${text(to)}${unit}`;
    return `${text(from)} to ${text(to)}${unit}`;
  };
  const labels = finite.length ? Array.from({ length: last + 1 }, (_, n) => label(n)) : [];
  return { colour, labels };
}

/** Return the smallest and largest value. */
function extremes(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/** Return a round step: 1, 2 or 5 times a power of ten; for logarithms, a quarter, half or whole decades. */
function niceStep(width, log) {
  if (log) return [0.25, 0.5, 1, 2, 5, 10].find((step) => step >= width) ?? 50;
  if (!(width > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(width));
  return [1, 2, 5, 10].find((step) => step * power >= width * 0.999) * power;
}

function boundText(metric, value) {
  const shown = METRICS[metric].unit === "%" ? 100 * value : value;
  return Math.abs(shown) >= 1e-4 || shown === 0 ? `${Number(shown.toPrecision(3))}` : shown.toExponential(1);
}
