// Map of blocks × modules, one for each stack of blocks.

const MAX_BLOCKS = 400; // columns
const MAX_MODULES = 48; // rows
const CELL = { least: 9, narrow: 4, most: 44, text: 23 }; // pixels
const LABEL = { letter: 7.3, most: 300, narrow: 132 }; // pixels

/**
 * Draw the maps into a section, by the metric selected in it.
 * `pick(place, rows)` is called with the layers of a selected cell.
 */
function heatMaps(section, layers, pick) {
  const stacks = stacksOf(layers);
  if (!stacks.length) return;
  section.hidden = false;
  const select = section.querySelector("select");
  fillSelect(select, Object.entries(METRICS).map(([key, { title }]) => [key, title]));
  if (hasMetric(layers, section.dataset.first)) select.value = section.dataset.first;
  const draw = () => drawMaps(section, layers, stacks, select.value, pick);
  select.addEventListener("change", draw);
  draw();
}

/** Return true if most layers that differ have the metric. */
function hasMetric(layers, metric) {
  if (!(metric in METRICS)) return false;
  const differing = layers.status.reduce((sum, status) => sum + (status === DIFFERS), 0);
  return layers[metric].reduce((sum, value) => sum + !Number.isNaN(value), 0) > differing / 2;
}

/** Return stacks of blocks in file order: {name, blocks, modules, cells}; a cell is a list of layers. */
function stacksOf(layers) {
  const found = new Map();
  for (let i = 0; i < layers.n; i++) {
    if (layers.stack[i] === null || layers.status[i] === CHANGED) continue;
    const key = layers.stack[i];
    if (!found.has(key)) found.set(key, { name: key, blocks: new Set(), modules: new Map(), cells: new Map() });
    const stack = found.get(key);
    const cell = `${layers.block[i]} ${layers.module[i]}`;
    stack.blocks.add(layers.block[i]);
    stack.modules.set(layers.module[i], stack.modules.get(layers.module[i]) || layers.status[i] !== IDENTICAL);
    if (!stack.cells.has(cell)) stack.cells.set(cell, []);
    stack.cells.get(cell).push(i);
  }
  const natural = new Intl.Collator("en", { numeric: true }).compare;
  return [...found.values()]
    .map((stack) => ({
      ...stack,
      blocks: [...stack.blocks].sort((a, b) => a - b),
      // Modules that are identical in all blocks, such as norms, have no error to show.
      modules: [...stack.modules].filter(([, differs]) => differs).map(([module]) => module).sort(natural),
    }))
    .filter((stack) => stack.modules.length && stack.blocks.length > 1);
}

function drawMaps(section, layers, stacks, metric, pick) {
  const worst = new Map(); // layer by cell
  const values = [];
  for (const stack of stacks) {
    for (const rows of stack.cells.values()) {
      const row = rows.reduce((a, b) => (badness(layers, metric, b) > badness(layers, metric, a) ? b : a));
      worst.set(rows, row);
      if (layers.status[row] === DIFFERS) values.push(layers[metric][row]);
    }
  }
  const scale = scaleOf(metric, values);
  const label = labelWidth(stacks.flatMap(({ modules }) => modules)); // equal in all maps, which aligns them
  const maps = stacks.map((stack) => mapOf(section, layers, stack, metric, scale, worst, label, pick));
  section.querySelector(".maps").replaceChildren(...maps);
  const shown = stacks.flatMap(({ cells, modules, blocks }) =>
    modules.flatMap((module) => blocks.map((block) => worst.get(cells.get(`${block} ${module}`)))),
  );
  legend(section, layers, scale, shown.filter((row) => row !== undefined), metric);
  section.querySelector(".readout").textContent = "";
}

function mapOf(section, layers, stack, metric, scale, worst, label, pick) {
  const blocks = stack.blocks.slice(0, MAX_BLOCKS);
  const modules = worstModules(layers, stack, metric, worst);
  const cells = new Map(); // by element
  const body = modules.map((module, y) => {
    const row = element("tr", {}, element("th", { scope: "row", title: module }, module));
    blocks.forEach((block, x) => {
      const rows = stack.cells.get(`${block} ${module}`);
      const cell = rows ? cellOf(layers, metric, scale, worst.get(rows)) : element("td");
      if (rows) {
        cells.set(cell, { x, y, rows, block, module, text: describeCell(layers, metric, stack.name, block, module, rows, worst) });
        cell.setAttribute("aria-label", cells.get(cell).text);
      }
      row.append(cell);
    });
    return row;
  });
  const grid = [];
  for (const [cell, { x, y }] of cells) (grid[y] ??= [])[x] = cell;
  const every = blocks.length > 150 ? 20 : blocks.length > 60 ? 10 : 5;
  const heads = blocks.map((block) => element("th", { scope: "col", class: block % every ? null : "tick" }, `${block}`));
  const head = element("col");
  head.style.width = `${label}px`;
  const table = element(
    "table", { role: "grid", "aria-label": `${METRICS[metric].title} in ${stack.name}` },
    element("colgroup", {}, head, element("col", { span: blocks.length })),
    element("thead", {}, element("tr", {}, element("td"), ...heads)),
    element("tbody", {}, ...body),
  );
  const cut = [
    blocks.length < stack.blocks.length ? `the first ${blocks.length} of ${formatCount(stack.blocks.length, "block")}` : "",
    modules.length < stack.modules.length ? `the ${modules.length} worst of ${formatCount(stack.modules.length, "module")}` : "",
  ].filter(Boolean);
  const caption = element("figcaption", {}, `${stack.name} `, element("span", {}, cut.join(", ")));
  const figure = element("figure", { class: "map" }, caption, element("div", { class: "scroll" }, table));
  table.style.minWidth = `${label + blocks.length * (isNarrow() ? CELL.narrow : CELL.least)}px`;
  table.style.maxWidth = `${label + blocks.length * CELL.most}px`;
  table.style.width = "100%";
  new ResizeObserver(() => {
    table.classList.toggle("narrow", (table.clientWidth - label) / blocks.length < CELL.text);
  }).observe(table);
  listen(section, table, cells, grid, pick, stack.name);
  return figure;
}

function isNarrow() {
  return matchMedia("(max-width: 760px)").matches;
}

function labelWidth(modules) {
  const [, longest] = extremes(modules.map((module) => module.length));
  return Math.min(longest * LABEL.letter + 12, isNarrow() ? LABEL.narrow : LABEL.most);
}

/** Return all modules, or the worst MAX_MODULES. */
function worstModules(layers, stack, metric, worst) {
  if (stack.modules.length <= MAX_MODULES) return stack.modules;
  const worstOf = new Map();
  for (const [key, rows] of stack.cells) {
    const module = key.slice(key.indexOf(" ") + 1);
    worstOf.set(module, Math.max(worstOf.get(module) ?? -Infinity, badness(layers, metric, worst.get(rows))));
  }
  const kept = [...stack.modules].sort((a, b) => worstOf.get(b) - worstOf.get(a)).slice(0, MAX_MODULES);
  return stack.modules.filter((module) => kept.includes(module));
}

function cellOf(layers, metric, scale, row) {
  const cell = element("td", { tabindex: "-1" });
  const value = layers[metric][row];
  if (layers.status[row] === NOT_COMPARED) cell.append("?");
  else if (layers.status[row] === IDENTICAL) cell.append("=");
  else if (Number.isNaN(value)) cell.append("!");
  else if (value === Infinity) cell.append("=");
  else cell.append(METRICS[metric].brief(value));
  cell.className = `cell ${markOf(layers, metric, scale, row)}`;
  return cell;
}

/** Return the class that colours a layer. */
function markOf(layers, metric, scale, row) {
  if (layers.status[row] === NOT_COMPARED) return "lost";
  if (layers.status[row] === IDENTICAL) return "same";
  const value = layers[metric][row];
  if (value === Infinity) return "same";
  return Number.isNaN(value) ? "unsound" : `h${scale.colour(value)}`;
}

function valueText(layers, metric, row) {
  if (layers.status[row] === NOT_COMPARED) return "not compared";
  if (layers.status[row] === IDENTICAL) return "identical";
  const value = layers[metric][row];
  return Number.isNaN(value) ? "undefined" : withUnit(metric, value);
}

function describeCell(layers, metric, stack, block, module, rows, worst) {
  const text = `${stack}.${block} ${module}: ${valueText(layers, metric, worst.get(rows))}`;
  return rows.length > 1 ? `${text}, the worst of ${formatCount(rows.length, "weight")}` : text;
}

function listen(section, table, cells, grid, pick, stack) {
  const readout = section.querySelector(".readout");
  const cellAt = (event) => event.target.closest("td.cell");
  const showText = (event) => {
    const cell = cellAt(event);
    if (cell) readout.textContent = cells.get(cell).text;
  };
  const choose = (cell) => {
    const { rows, block, module } = cells.get(cell);
    pick(`${stack}.${block} ${module}`, rows);
  };
  table.addEventListener("mouseover", showText);
  table.addEventListener("focusin", showText);
  table.addEventListener("click", (event) => cellAt(event) && choose(cellAt(event)));
  table.addEventListener("keydown", (event) => {
    if ((event.key === "Enter" || event.key === " ") && cellAt(event)) {
      event.preventDefault();
      choose(cellAt(event));
    }
  });
  cells.keys().next().value?.setAttribute("tabindex", "0");
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  addRovingFocus(table, "td.cell", (cell, key) => {
    let { x, y } = cells.get(cell);
    const [right, down] = moves[key] ?? [0, 0];
    const width = table.rows[0].cells.length;
    while (right || down) {
      [x, y] = [x + right, y + down];
      if (x < 0 || y < 0 || x >= width || y >= grid.length) return null;
      if (grid[y]?.[x]) return grid[y][x];
    }
    return null;
  });
}

function legend(section, layers, scale, shown, metric) {
  const items = scale.labels.map((label, n) => [`h${n}`, "", label]);
  if (shown.some((row) => layers.status[row] === NOT_COMPARED)) items.push(["lost", "?", "not compared"]);
  if (shown.some((row) => layers.status[row] === DIFFERS && Number.isNaN(layers[metric][row]))) {
    items.push(["unsound", "!", "undefined"]);
  }
  if (shown.some((row) => layers.status[row] === IDENTICAL || layers[metric][row] === Infinity)) items.push(["same", "=", "identical"]);
  section.querySelector(".legend").replaceChildren(
    ...items.map(([mark, sign, text]) => element("li", {}, element("i", { class: mark, "aria-hidden": "true" }, sign), text)),
  );
}
