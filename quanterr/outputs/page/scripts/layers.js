// Builds the map and table of a page whose data define the metrics.

const METRICS = {};

const SHOWN = {
  dB: { step: 3, show: (v) => v.toFixed(2), brief: (v) => v.toFixed(0) },
  bit: { step: 0.5, show: (v) => v.toFixed(3), brief: (v) => v.toFixed(1) },
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
    const own = SHOWN[unit] ?? SHOWN[""];
    METRICS[key] = { title, better, unit: ["bit", "B"].includes(unit) ? "" : unit, log, ...(is_signed ? addSign(own) : own) };
  }
}

function columnsOf({ metrics, titles }) {
  return [
    { key: "name", title: "Layer" },
    ...Object.entries(titles).map(([key, title]) => ({ key, title, wide: true })),
    ...Object.entries(metrics)
      .filter(([, { column }]) => column)
      .map(([key, { column, is_wide }]) => ({ key, title: column, number: true, wide: is_wide })),
  ];
}

/** Return the details of a layer. */
function contentsOf({ titles, details }, layers, i) {
  const found = facts([
    ...Object.entries(titles).map(([key, title]) => [title, layers[key][i]]),
    ...Object.entries(METRICS).map(([key, { title }]) => [title, valueText(layers, key, i)]),
  ]);
  if (!details) return [found];
  if (!details.rows[i]) return [found, element("p", { class: "about" }, "The JSON report has more about this layer.")];
  const rows = details.rows[i].map(([first, ...texts]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...texts.map((text) => element("td", { class: "number" }, text))),
  );
  return [found, plainTable(details.title, details.heads, rows)];
}

async function main() {
  addThemeButton();
  addCopyButtons();
  const report = await unpack(byId("data"));
  metricsOf(report.metrics);
  const layers = layersOf(report);
  document.documentElement.dataset.live = ""; // shows elements that need the script
  const words = Object.entries(report.titles);
  const drawer = new Drawer(layers, (i) => contentsOf(report, layers, i));
  const table = new LayerTable(layers, columnsOf(report), report.order, (place) => {
    drawer.open(table.order, place, (last) => table.goTo(last));
  });
  const filters = new Filters(table, words.map(([key, title]) => [key, title, pairsOf(layers[key])]));
  const pick = picker(table, filters, drawer);
  const map = byId("places");
  map.dataset.first = report.colour;
  heatMaps(map, layers, pick);
  if (report.front.length) {
    frontPlot(byId("front-plot"), report.front, (n) => {
      byId("place-metric").value = `snr_${n}`;
      byId("place-metric").dispatchEvent(new Event("change"));
      map.scrollIntoView();
    });
  }
  dropDeadLinks();
  followLinks(opener(layers, drawer), (parts) => filters.follow(parts));
}

main().catch(showFailure);
