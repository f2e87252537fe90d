// Builds the page of a report.

async function main() {
  addThemeButton();
  addCopyButtons();
  sizeStrips();
  const report = await unpack(byId("data"));
  metricsOf(report.metrics);
  const layers = layersOf(report);
  document.documentElement.dataset.live = ""; // shows elements that need the script
  const details = new Details(report, layers);
  const drawer = new Drawer(layers, (i) => details.contents(i));
  const table = new LayerTable(layers, columnsOf(report), "snr_db", (place) => {
    drawer.open(table.order, place, (last) => table.goTo(last));
  });
  table.filter.having = report.found;
  const counts = STATUSES.map((_, n) => layers.status.reduce((sum, value) => sum + (value === n), 0));
  const filters = new Filters(table, [
    ["status", "Status", STATUSES.map((text, n) => [`${n}`, `${text} (${counts[n].toLocaleString("en")})`]).filter((_, n) => counts[n])],
    ["role", "Role", pairsOf(layers.role)],
    ["format", "Format", pairsOf(layers.format)],
    ["finding", "Finding", Object.entries(report.found).map(([code, rows]) => [code, `${code} (${rows.length.toLocaleString("en")})`])],
  ]);
  const pick = picker(table, filters, drawer);
  heatMaps(byId("places"), layers, pick);
  histograms(layers, report.usual, pick);
  showKeep(layers, report.keep, pick);
  dropDeadLinks();
  followLinks(opener(layers, drawer), (parts) => filters.follow(parts));
}

main().catch(showFailure);
