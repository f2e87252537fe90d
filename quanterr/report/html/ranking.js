// Puts the parts of a ranking's page together: each candidate's SNR is a metric of every layer.

const METRICS = {};
const LEVEL = { unit: "dB", better: "higher", step: 3, show: (v) => v.toFixed(2), brief: (v) => v.toFixed(0) };

function columnsOf(candidates) {
  METRICS.spread = {
    title: "Spread", unit: "%", better: "lower", log: true, show: (v) => percent(v, 3), brief: (v) => percent(v, 1),
  };
  candidates.forEach(({ name }, n) => (METRICS[`snr_${n}`] = { ...LEVEL, title: name }));
  return [
    { key: "name", title: "Layer" },
    { key: "role", title: "Role", wide: true },
    { key: "best", title: "Best", wide: true },
    { key: "spread", title: "Spread %", number: true },
    ...candidates.map(({ name }, n) => ({ key: `snr_${n}`, title: name, number: true, wide: n > 0 })),
  ];
}

/** How each candidate stores a layer. */
function contentsOf(report, layers, i) {
  const rows = report.candidates.map(({ name }, n) => {
    const [format, bytes, error] = report.choices[i]?.[n] ?? ["–", null, null];
    return element(
      "tr", {}, element("th", { scope: "row" }, name), element("td", {}, format),
      element("td", { class: "number" }, shown(`snr_${n}`, layers[`snr_${n}`][i])),
      element("td", { class: "number" }, bytes === null ? "–" : bytesText(bytes)),
      element("td", { class: "number" }, figure(error)),
    );
  });
  const parts = [facts([["Role", layers.role[i]], ["Best", layers.best[i]]])];
  parts.push(plainTable("Candidates", ["", "format", "SNR dB", "size", "Σe²"], rows));
  if (!report.choices[i]) parts.push(element("p", { class: "about" }, "Formats and sizes of this layer are in the JSON."));
  return parts;
}

async function main() {
  themes();
  const report = await unpacked(byId("data"));
  const columns = columnsOf(report.candidates);
  const layers = layersOf(report);
  document.documentElement.dataset.live = ""; // shows what needs the script
  const drawer = new Drawer(layers, (i) => contentsOf(report, layers, i));
  const table = new LayerTable(layers, columns, "spread", (place) => {
    drawer.open(table.order, place, (last) => table.goTo(last));
  });
  const filters = new Filters(table, [["role", "Role", pairsOf(layers.role)], ["best", "Best", pairsOf(layers.best)]]);
  const map = byId("places");
  map.dataset.first = "snr_0";
  heatMaps(map, layers, picker(table, filters, drawer));
  frontPlot(byId("front-plot"), report.candidates, (n) => {
    byId("place-metric").value = `snr_${n}`;
    byId("place-metric").dispatchEvent(new Event("change"));
    map.scrollIntoView();
  });
  followLinks(opener(layers, drawer), (parts) => filters.follow(parts));
}

main().catch(failed);
