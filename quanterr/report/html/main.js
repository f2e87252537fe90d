// Puts the parts together.

const THEMES = ["auto", "light", "dark"];

function themes() {
  const button = byId("theme");
  let chosen = 0;
  button.addEventListener("click", () => {
    chosen = (chosen + 1) % THEMES.length;
    if (chosen) document.documentElement.dataset.theme = THEMES[chosen];
    else delete document.documentElement.dataset.theme;
    button.textContent = `Theme: ${THEMES[chosen]}`;
  });
}

function controls(layers, table) {
  const status = ["differ", "norms, biases", "identical", "not compared"];
  const counts = status.map((_, n) => layers.status.reduce((sum, value) => sum + (value === n), 0));
  const known = (key) => [...new Set(layers[key])].filter((word) => word !== null).sort();
  choices(byId("status"), [
    ["", "all"],
    ...status.map((text, n) => [`${n}`, `${text} (${counts[n].toLocaleString("en")})`]).filter((_, n) => counts[n]),
  ]);
  for (const key of ["role", "format"]) choices(byId(key), [["", "all"], ...known(key).map((word) => [word, word])]);
  for (const key of ["status", "role", "format"]) {
    byId(key).addEventListener("change", ({ target }) => table.show({ [key]: target.value }));
  }
  byId("search").addEventListener("input", ({ target }) => table.show({ words: wordsOf(target.value) }));
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "Enter") table.goTo(0);
    if (event.key === "ArrowDown") event.preventDefault();
  });
  byId("reset").addEventListener("click", () => reset(table));
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, select, textarea, dialog");
    if (event.key !== "/" || typing || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    byId("search").focus();
  });
}

function wordsOf(text) {
  return text
    .toLowerCase()
    .split(/\s+/)
    .map((word) => ({ word: word.replace(/^!/, ""), without: word.startsWith("!") }))
    .filter(({ word }) => word);
}

/** No filter; or only some layers, with the reason on a button that takes it away. */
function reset(table, rows = null, text = "") {
  for (const key of ["search", "status", "role", "format"]) byId(key).value = "";
  const chip = text ? element("button", { type: "button", class: "chip", "aria-label": `Show all, not only ${text}` }, `${text} ✕`) : null;
  chip?.addEventListener("click", () => {
    reset(table);
    byId("search").focus();
  });
  byId("picked").replaceChildren(...(chip ? [chip] : []));
  table.show({ words: [], status: "", role: "", format: "", rows });
}

/** Parts of a strip as wide as their shares. */
function strips() {
  for (const part of document.querySelectorAll(".strip i")) part.style.flexGrow = part.dataset.share;
}

async function main() {
  themes();
  strips();
  const report = await unpacked(byId("data"));
  const layers = layersOf(report);
  document.documentElement.dataset.live = ""; // shows what needs the script
  const snr = Array.from(layers.snr_db).filter((_, i) => layers.status[i] === DIFFERS);
  const details = new Details(report, layers);
  const table = new LayerTable(layers, scaleOf("snr_db", snr), (place) => {
    details.open(table.order, place, (last) => table.goTo(last));
  });
  const pick = (text, rows) => {
    if (rows.length === 1) {
      details.open(rows, 0);
      return;
    }
    reset(table, rows, text);
    byId("layers").scrollIntoView();
    table.goTo(0);
  };
  controls(layers, table);
  table.show();
  heatMaps(layers, pick);
  histograms(layers, report.usual, pick);
}

main().catch((error) => {
  byId("failure").hidden = false;
  byId("failure").textContent = `The table of layers cannot be shown in this browser (${error}). The JSON report has all of it.`;
});
