// Puts the parts of an evaluation's page together: each candidate's output error is a metric of every weight.

const METRICS = {};

function columnsOf(candidates) {
  const share = { unit: "%", better: "lower", log: true, show: (v) => percent(v, 3), brief: (v) => percent(v, 2) };
  const of = (name) => (candidates.length > 1 ? `, ${name}` : "");
  candidates.forEach((name, n) => {
    METRICS[`output_${n}`] = { ...share, title: `Output error${of(name)}` };
    METRICS[`share_${n}`] = { ...share, title: `Share of its block${of(name)}` };
  });
  const single = candidates.length === 1;
  return [
    { key: "name", title: "Weight" },
    { key: "role", title: "Role", wide: true },
    { key: "unit", title: "Block", wide: true },
    ...candidates.map((name, n) => ({ key: `output_${n}`, title: single ? "Output error %" : `${name} %`, number: true, wide: n > 0 })),
    ...candidates.map((name, n) => ({
      key: `share_${n}`, title: single ? "Share of block %" : `${name}, share`, number: true, wide: true, hidden: !single,
    })),
  ];
}

async function main() {
  themes();
  const report = await unpacked(byId("data"));
  const columns = columnsOf(report.candidates);
  const layers = layersOf(report);
  document.documentElement.dataset.live = ""; // shows what needs the script
  const drawer = new Drawer(layers, (i) => [
    facts([
      ["Role", layers.role[i]], ["Block", layers.unit[i]],
      ...Object.entries(METRICS).map(([key, { title }]) => [title, valueText(layers, key, i)]),
    ]),
  ]);
  const table = new LayerTable(layers, columns, "output_0", (place) => {
    drawer.open(table.order, place, (last) => table.goTo(last));
  });
  const filters = new Filters(table, [["role", "Role", pairsOf(layers.role)], ["unit", "Block", pairsOf(layers.unit)]]);
  heatMaps(byId("places"), layers, picker(table, filters, drawer));
  followLinks(opener(layers, drawer), (parts) => filters.follow(parts));
}

main().catch(failed);
