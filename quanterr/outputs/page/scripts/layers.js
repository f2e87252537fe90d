// Builds the map and table of a page whose data define the metrics.

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
