// Puts the parts of a diff's page together: three maps of the same layers.

const LEVEL = { unit: "dB", better: "higher", step: 3, show: (v) => v.toFixed(2), brief: (v) => v.toFixed(0) };
const signed = (v, places) => `${v > 0 ? "+" : ""}${v.toFixed(places)}`;
const METRICS = {
  change_db: { title: "Change", unit: "dB", better: "higher", step: 1.5, show: (v) => signed(v, 2), brief: (v) => signed(v, 1) },
  new_snr_db: { ...LEVEL, title: "New SNR" },
  old_snr_db: { ...LEVEL, title: "Old SNR" },
};
const COLUMNS = [
  { key: "name", title: "Layer" },
  { key: "role", title: "Role", wide: true },
  { key: "format", title: "Format", wide: true },
  { key: "change_db", title: "Change dB", number: true },
  { key: "new_snr_db", title: "New dB", number: true },
  { key: "old_snr_db", title: "Old dB", wide: true, number: true },
];

async function main() {
  themes();
  const layers = layersOf(await unpacked(byId("data")));
  document.documentElement.dataset.live = ""; // shows what needs the script
  const drawer = new Drawer(layers, (i) => [
    facts([
      ["Role", layers.role[i]], ["Format", layers.format[i]],
      ...Object.entries(METRICS).map(([key, { title }]) => [title, valueText(layers, key, i)]),
    ]),
  ]);
  const table = new LayerTable(layers, COLUMNS, "change_db", (place) => {
    drawer.open(table.order, place, (last) => table.goTo(last));
  });
  const filters = new Filters(table, [["role", "Role", pairsOf(layers.role)], ["format", "Format", pairsOf(layers.format)]]);
  const pick = picker(table, filters, drawer);
  for (const section of document.querySelectorAll(".places")) heatMaps(section, layers, pick);
  followLinks(opener(layers, drawer), (parts) => filters.follow(parts));
}

main().catch(failed);
