// Metrics of the layers of a report, and the columns of its table.

/** Metrics by name. `step` is the smallest step between colours. */
const METRICS = {
  snr_db: { title: "SNR", unit: "dB", better: "higher", step: 3, show: (v) => v.toFixed(2), brief: (v) => v.toFixed(0) },
  excess_db: { title: "Avoidable", unit: "dB", better: "lower", step: 1.5, show: (v) => v.toFixed(2), brief: (v) => v.toFixed(1) },
  relative_error: {
    title: "Relative error", unit: "%", better: "lower", log: true,
    show: (v) => percent(v, 3), brief: (v) => (v < 0.0995 ? percent(v, 2) : percent(v, 3)),
  },
  error_share: { title: "Share of the error", unit: "%", better: "lower", log: true, show: (v) => percent(v, 3), brief: (v) => percent(v, 1) },
  mean_absolute_error: { title: "Mean |e|", unit: "", better: "lower", log: true, show: scientific, brief: () => "" },
  max_absolute_error: { title: "Max |e|", unit: "", better: "lower", log: true, show: scientific, brief: () => "" },
  bits_per_weight: {
    title: "Bits per weight", unit: "", better: "higher", step: 0.5, show: (v) => v.toFixed(3), brief: (v) => v.toFixed(1),
  },
  bytes: { title: "Size", unit: "", better: "lower", log: true, show: bytesText, brief: () => "" },
};

/** Metrics of an evaluation of the same pair, if there is one. */
const EVALUATED = {
  output_error: { title: "Output error", unit: "%", better: "lower", log: true, show: (v) => percent(v, 3), brief: (v) => percent(v, 2) },
  predicted_output_error: {
    title: "Predicted output error", unit: "%", better: "lower", log: true, show: (v) => percent(v, 3), brief: (v) => percent(v, 2),
  },
  predicted_kld: { title: "Predicted KLD", unit: "nat", better: "lower", log: true, show: scientific, brief: () => "" },
};

const COLUMNS = [
  { key: "name", title: "Layer" },
  { key: "role", title: "Role", wide: true },
  { key: "format", title: "Format", wide: true },
  { key: "shape", title: "Shape", wide: true, number: true },
  { key: "snr_db", title: "SNR dB", number: true },
  { key: "excess_db", title: "Avoidable dB", wide: true, number: true },
  { key: "relative_error", title: "Rel. %", number: true },
  { key: "error_share", title: "Share %", wide: true, number: true },
  { key: "mean_absolute_error", title: "Mean |e|", wide: true, number: true, hidden: true },
  { key: "max_absolute_error", title: "Max |e|", wide: true, number: true },
  { key: "bits_per_weight", title: "Bits/w", wide: true, number: true },
  { key: "bytes", title: "Size", wide: true, number: true },
];

/** Add the metrics and columns of an evaluation. */
function withEvaluation(keys) {
  for (const key of keys) {
    METRICS[key] = EVALUATED[key];
    COLUMNS.push({ key, title: key === "output_error" ? "Output %" : "Pred. KLD", wide: true, number: true });
  }
}
