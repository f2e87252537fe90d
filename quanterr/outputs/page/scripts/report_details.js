// The details of a layer of a report, shown in the drawer.

const STATUS_TEXT = ["differs", "a norm, a bias or another 1-D tensor that changed", "identical on both sides", "not compared"];
const FACTS = [
  ["original_dtype", "Original dtype"],
  ["quantized_dtype", "Quantized dtype"],
  ["original_format", "Original format"],
  ["comfy_format", "ComfyUI format"],
  ["block_size", "Block size"],
  ["scale_factor", "Scale"],
  ["scale_count", "Scales"],
];

class Details {
  constructor(report, layers) {
    this.report = report;
    this.layers = layers;
    this.known = new Map(report.details.rows.map((row, n) => [row, n]));
  }

  contents(i) {
    const { layers, report } = this;
    const n = this.known.get(i);
    const known = n === undefined ? null : (key) => report.details.columns[key]?.[n] ?? null;
    const parts = [this.headline(i), this.findings(i), this.context(i, known), this.facts(i, known)];
    if (layers.status[i] === DIFFERS || layers.status[i] === CHANGED) {
      parts.push(this.metrics(i, known), ...(known ? this.more(known) : []));
      if (!known) parts.push(element("p", { class: "about" }, "The other metrics of this layer are in the JSON and CSV reports."));
    }
    return parts.filter((part) => part !== null);
  }

  /** Return the main metrics. */
  headline(i) {
    if (this.layers.status[i] === IDENTICAL || this.layers.status[i] === NOT_COMPARED) return null;
    const cells = ["snr_db", "excess_db", "relative_error", "max_absolute_error"].map((metric) => {
      const value = element("p", { class: "value" }, valueText(this.layers, metric, i));
      return element("div", {}, element("p", { class: "label" }, METRICS[metric].title), value);
    });
    return element("div", { class: "figures" }, ...cells);
  }

  findings(i) {
    const found = this.report.findings.filter(({ row }) => row === i);
    if (!found.length) return null;
    return element(
      "ul", { class: "findings" },
      ...found.map(({ severity, message, remedy }) =>
        element(
          "li", {}, element("span", { class: `tag ${severity}` }, severity),
          element("div", {}, element("p", {}, message), remedy && element("p", { class: "remedy" }, remedy)),
        ),
      ),
    );
  }

  /** Return sentences that place the SNR: its peers, its format, and the price of keeping the layer. */
  context(i, known) {
    const { layers, report } = this;
    const snr = layers.snr_db[i];
    if (layers.status[i] !== DIFFERS || !Number.isFinite(snr)) return null;
    const said = [peersText(layers, i), ...formatTexts(known, snr), keepText(report.keep, i)].filter(Boolean);
    if (!said.length) return null;
    return element("div", { class: "context" }, element("h3", {}, "In context"), element("ul", {}, ...said.map((text) => element("li", {}, text))));
  }

  facts(i, known) {
    const { layers, report } = this;
    const rows = [["Status", STATUS_TEXT[layers.status[i]]], ["Role", layers.role[i]], ["Format", layers.format[i]]];
    if (layers.reason[i]) rows.splice(1, 0, ["Why", layers.reason[i]]);
    rows.push(["Shape", layers.shape[i]], ["Size", bytesText(layers.bytes[i])]);
    for (const key of report.evaluated) {
      if (!Number.isNaN(layers[key][i])) rows.push([METRICS[key].title, withUnit(key, layers[key][i])]);
    }
    if (!Number.isNaN(layers.error_share[i])) rows.push(["Share of the error", withUnit("error_share", layers.error_share[i])]);
    const usual = this.report.usual[layers.format[i]];
    if (usual && Number.isNaN(layers.excess_db[i])) rows.push(["Usual SNR", `${usual[0]} to ${usual[1]} dB in this format`]);
    for (const [key, title] of known ? FACTS : []) {
      const value = known(key);
      if (value !== null && value !== 0) rows.push([title, Array.isArray(value) ? value.join(" × ") : `${value}`]);
    }
    for (const evidence of known?.("evidence") ?? []) rows.push(["Evidence", evidence]);
    return facts(rows);
  }

  /** Return a row with value and definition for each metric; without details, only for those in the table. */
  metrics(i, known) {
    const value = (key) => (known ? known(key) : key in METRICS ? this.layers[key][i] : undefined);
    const why = (key) => known?.("nonfinite")?.[key] ?? "–";
    const rows = this.report.described
      .filter(({ name }) => value(name) !== undefined)
      .map(({ name, unit, formula }) => {
        const number = value(name);
        const text = number === null || Number.isNaN(number) ? why(name) : `${figure(number)}${unit ? ` ${unit}` : ""}`;
        return element(
          "tr", {}, element("th", { scope: "row" }, name.replaceAll("_", " ")),
          element("td", { class: "formula" }, formula), element("td", { class: "number" }, text),
        );
      });
    return plainTable("Metrics", null, rows);
  }

  more(known) {
    const parts = [];
    const percentiles = known("absolute_error_percentiles");
    if (percentiles) {
      const cells = Object.entries(percentiles).map(([key, value]) => [key.replace("p", "").replace("_", "."), value]);
      parts.push(plainTable("Percentiles of |e|", ["% of the elements", "|e| at most"], cells.map(([share, value]) => numbers(share, figure(value)))));
    }
    const worst = known("worst_element");
    if (worst) parts.push(plainTable("Largest error", ["row", "column", "original", "quantized"], [numbers(...worst.index, figure(worst.x), figure(worst.y))]));
    const rows = known("worst_rows");
    if (rows?.length) {
      const found = rows.map(({ row, snr_db, max_absolute_error }) => numbers(row, figure(snr_db), figure(max_absolute_error)));
      parts.push(plainTable("Worst rows", ["row", "SNR dB", "max |e|"], found));
    }
    return parts;
  }
}

const MIN_PEERS = 3;
const FAR_DB = 6;

/** Describe the SNR of the other layers of the same role and format. */
function peersText(layers, i) {
  const peers = [];
  for (let n = 0; n < layers.n; n++) {
    const alike = layers.role[n] === layers.role[i] && layers.format[n] === layers.format[i];
    if (n !== i && alike && layers.status[n] === DIFFERS && Number.isFinite(layers.snr_db[n])) peers.push(layers.snr_db[n]);
  }
  if (peers.length < MIN_PEERS) return null;
  peers.sort((a, b) => a - b);
  const at = (share) => peers[Math.round(share * (peers.length - 1))];
  const [low, middle, high] = [at(0.1), at(0.5), at(0.9)].map((level) => level.toFixed(1));
  const range = low === high ? `${middle} dB` : `${low} to ${high} dB, with a median of ${middle}`;
  const below = at(0.5) - layers.snr_db[i];
  const far = below > FAR_DB ? ` This layer is ${below.toFixed(1)} dB below.` : "";
  return `The ${peers.length.toLocaleString("en")} other layers of role ${layers.role[i]} in ${layers.format[i]} usually have ${range}.${far}`;
}

/** Describe how the format, the scales and the codes limit the SNR. Limits from a sample of rows can be below the SNR. */
function formatTexts(known, snr) {
  if (!known) return [];
  const [format, attainable, excess, lost] = ["format_snr_db", "attainable_snr_db", "excess_db", "scale_loss_db"].map(known);
  const least = (level) => Math.max(level, snr).toFixed(1);
  return [
    format === null ? null : `With good scales, the format allows about ${least(format)} dB for these weights.`,
    attainable === null ? null : `The stored scales allow about ${least(attainable)} dB${lost > 1 ? `: they lose ${lost.toFixed(1)} dB` : ""}.`,
    attainable === null || excess === null ? null : excess > 0.1 ? `The stored codes lose another ${excess.toFixed(1)} dB.` : "The stored codes are the nearest: no other rounding would help.",
  ];
}

/** Describe the gain and the cost of keeping the layer as it is in the original. */
function keepText(keep, i) {
  const place = keep.rows.indexOf(i);
  if (place < 0) return null;
  const share = Number((100 * keep.shares[place]).toPrecision(3));
  const bytes = Number(((100 * keep.added[place]) / keep.bytes).toPrecision(3));
  return `Keeping it unquantized removes ${share} % of the whole error for ${bytes} % more bytes (${bytesText(keep.added[place])}).`;
}
