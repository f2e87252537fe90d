// Metrics of layers and columns of their table, as the page's data declare them.

const METRICS = {};

const SHOWN = {
  dB: { step: 3, show: (v) => v.toFixed(2), brief: (v) => v.toFixed(0) },
  loss: { step: 1.5, show: (v) => v.toFixed(2), brief: (v) => v.toFixed(1) },
  bit: { step: 0.5, show: (v) => v.toFixed(3), brief: (v) => v.toFixed(1) },
  nat: { show: scientific, brief: () => "" },
  B: { show: (v) => bytesText(v), brief: () => "" },
  "%": { show: (v) => percent(v, 3), brief: (v) => percent(v, 2) },
  "": { show: (v) => figure(v), brief: () => "" },
};

/** Return formatters that show the sign of a change. */
function addSign({ step, show, brief }) {
  const plus = (show) => (v) => (v > 0 ? "+" : "") + show(v);
  return { step: step && step / 2, show: plus(show), brief: plus(brief) };
}

/** Define METRICS by key, for the scripts of maps and tables. */
function metricsOf(declared) {
  for (const [key, { title, better, unit, log, is_signed }] of Object.entries(declared)) {
    const own = SHOWN[unit === "dB" && better === "lower" ? "loss" : unit] ?? SHOWN[""];
    METRICS[key] = { title, better, unit: ["bit", "B"].includes(unit) ? "" : unit, log, ...(is_signed ? addSign(own) : own) };
  }
}

function columnsOf({ metrics, titles }) {
  return [
    { key: "name", title: "Layer" },
    ...Object.entries(titles).map(([key, title]) => ({ key, title, wide: true, number: key === "shape" })),
    ...Object.entries(metrics)
      .filter(([, { column }]) => column)
      .map(([key, { column, is_wide }]) => ({ key, title: column, number: true, wide: is_wide })),
  ];
}
