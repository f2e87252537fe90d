// The table of layers, filtered and sorted; only visible rows exist as elements.

const EXTRA = 8; // rows above and below the visible ones
const PRINTED = 60; // rows in print
const ENDING = ".weight"; // of most names, which the table leaves out
const LONGEST = 44; // characters of a name that widen its column

class LayerTable {
  /** `open(place)` is called with the position of a selected layer; `first` is the initial sort key. */
  constructor(layers, columns, first, open) {
    this.layers = layers;
    this.all = columns;
    this.columns = columns;
    this.first = first;
    const values = Array.from(layers[first]).filter((_, i) => layers.status[i] === DIFFERS);
    this.scale = scaleOf(first, values);
    this.open = open;
    this.filter = { matches: () => true, chosen: {}, rows: null, having: null };
    this.sort = { key: first, worstFirst: true };
    this.order = []; // layers shown, in order
    this.active = 0; // position that Tab reaches
    this.viewport = byId("viewport");
    this.body = byId("rows");
    const lengths = Array.from({ length: layers.n }, (_, i) => (layers.status[i] === DIFFERS ? this.partsOf(i)[0].length : 0));
    byId("table").style.setProperty("--name", `${Math.min(Math.max(...lengths, 10), LONGEST)}ch`);
    this.makeHead();
    this.makeChooser();
    byId("csv").addEventListener("click", () => download("layers.csv", this.csv()));
    this.viewport.addEventListener("scroll", () => this.draw(), { passive: true });
    this.body.addEventListener("click", (event) => this.handleClick(event));
    this.viewport.addEventListener("keydown", (event) => this.handleKey(event));
    new ResizeObserver(() => this.draw()).observe(this.viewport);
    this.printing = false;
    for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
      window.addEventListener(event, () => {
        this.printing = printing;
        this.draw();
      });
    }
  }

  makeHead() {
    byId("widths").replaceChildren(
      ...this.columns.map(({ key, wide }) => element("col", { class: `${key}${wide ? " wide" : ""}` })),
    );
    byId("columns").replaceChildren(
      ...this.columns.map(({ key, title, number, wide }) => {
        const button = element("button", { type: "button" }, title);
        button.addEventListener("click", () => this.sortBy(key));
        const classes = [number ? "number" : "", wide ? "wide" : ""].join(" ").trim();
        return element("th", { scope: "col", "data-key": key, class: classes || null }, button);
      }),
    );
  }

  /** Make a checkbox for each column but the first, to show or hide it. */
  makeChooser() {
    const boxes = this.all.slice(1).map((column) => {
      const box = element("input", { type: "checkbox", value: column.key, checked: "" });
      box.addEventListener("change", () => {
        const chosen = new Set([...byId("chooser").querySelectorAll("input:checked")].map(({ value }) => value));
        this.columns = this.all.filter(({ key }, n) => n === 0 || chosen.has(key));
        this.makeHead();
        this.show();
      });
      return element("label", {}, box, ` ${column.title}`);
    });
    byId("chooser").replaceChildren(...boxes);
  }

  /**
   * Update the filter and show the number of layers. `chosen` maps columns to values; for `finding`, `having` lists the
   * layers with each finding.
   */
  show(filter = {}) {
    Object.assign(this.filter, filter);
    const { matches, chosen, rows, having } = this.filter;
    const { layers } = this;
    const equal = Object.entries(chosen).filter(([key, value]) => value !== "" && key !== "finding");
    const found = chosen.finding ? new Set(having?.[chosen.finding] ?? []) : null;
    const wanted = (i) =>
      equal.every(([key, value]) => `${layers[key][i]}` === value) && (!found || found.has(i)) && matches(layers.lower[i]);
    const all = rows ?? Array.from({ length: layers.n }, (_, i) => i);
    this.order = all.filter(wanted);
    this.arrange();
    const of = this.order.length === layers.n ? "" : ` of ${layers.n.toLocaleString("en")}`;
    const word = layers.n === 1 ? "tensor" : "tensors";
    byId("count").textContent = `${this.order.length.toLocaleString("en")}${of} ${word}, ${this.sortText()}`;
  }

  sortBy(key) {
    this.sort = { key, worstFirst: this.sort.key === key ? !this.sort.worstFirst : true };
    this.show();
  }

  sortText() {
    const { key, worstFirst } = this.sort;
    const { title } = this.all.find((column) => column.key === key);
    if (key in METRICS) return `${worstFirst ? "the worst" : "the best"} first by ${METRICS[key].title}`;
    return `by ${title.toLowerCase()}${worstFirst ? "" : ", reversed"}`;
  }

  arrange() {
    const { key, worstFirst } = this.sort;
    const rank = key in METRICS ? Float64Array.from({ length: this.layers.n }, (_, i) => -badness(this.layers, key, i)) : this.textRank(key);
    const sign = worstFirst ? 1 : -1;
    // By a metric, norms and biases follow the weights, and identical tensors are last or first.
    const tiers = key in METRICS ? { [CHANGED]: 1, [IDENTICAL]: worstFirst ? 2 : 0 } : {};
    const tier = (i) => tiers[this.layers.status[i]] ?? 0;
    this.order.sort((a, b) => tier(a) - tier(b) || (rank[a] === rank[b] ? a - b : rank[a] < rank[b] ? -sign : sign));
    for (const head of byId("columns").cells) {
      const ascending = key in METRICS ? worstFirst === (METRICS[key].better === "higher") : worstFirst;
      if (head.dataset.key === key) head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    this.active = 0;
    this.viewport.scrollTop = 0;
    this.draw();
  }

  /** Return the rank of each layer by a text column, in natural order: 2 before 10. */
  textRank(key) {
    this.ranks ??= {};
    if (!this.ranks[key]) {
      const texts = this.layers[key];
      const sorted = [...new Set(texts)].sort(new Intl.Collator("en", { numeric: true }).compare);
      const places = new Map(sorted.map((text, n) => [text, n]));
      this.ranks[key] = Float64Array.from(texts, (text) => places.get(text));
    }
    return this.ranks[key];
  }

  get rowHeight() {
    return parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row")) + 1;
  }

  /** Create the visible rows; in print, the first ones. */
  draw() {
    const { printing } = this;
    const height = this.rowHeight;
    const head = byId("columns").offsetHeight;
    const seen = Math.ceil(this.viewport.clientHeight / height);
    let first = Math.max(Math.floor((this.viewport.scrollTop - head) / height) - EXTRA, 0);
    let last = Math.min(first + seen + 2 * EXTRA, this.order.length);
    if (printing) [first, last] = [0, Math.min(PRINTED, this.order.length)];
    const focused = this.body.contains(document.activeElement);
    const rows = [];
    for (let place = first; place < last; place++) rows.push(this.rowOf(place));
    const above = this.gap(first * height);
    const below = this.gap(printing ? 0 : (this.order.length - last) * height);
    if (printing && last < this.order.length) rows.push(this.note(last));
    if (!this.order.length) rows.push(this.note(0));
    this.body.replaceChildren(above, ...rows, below);
    byId("table").setAttribute("aria-rowcount", this.order.length + 1);
    if (!this.body.querySelector('[tabindex="0"]')) {
      this.body.querySelector("button")?.setAttribute("tabindex", "0");
    }
    if (focused) (this.buttonAt(this.active) ?? this.viewport).focus({ preventScroll: true });
  }

  /** Return a layer's name without the beginning that all names share, and its usual ending, if it has that. */
  partsOf(i) {
    const name = this.layers.name[i].slice(this.layers.common.length);
    return name.endsWith(ENDING) && name !== ENDING ? [name.slice(0, -ENDING.length), ENDING] : [name, ""];
  }

  rowOf(place) {
    const i = this.order[place];
    const { layers } = this;
    const tabindex = place === this.active ? "0" : "-1";
    const [own, ending] = this.partsOf(i);
    const hidden = (text) => element("span", { class: "common" }, text);
    const name = element("button", { type: "button", tabindex, title: layers.name[i] }, hidden(layers.common), own, hidden(ending));
    const row = element("tr", { "aria-rowindex": place + 2, "data-place": place }, element("th", { scope: "row" }, name));
    for (const { key, number, wide } of this.columns.slice(1)) {
      const classes = [number ? "number" : "", wide ? "wide" : ""];
      const cell = element("td");
      if (key === this.first) classes.push(...this.fillFirst(cell, i));
      else if (key in METRICS) cell.append(formatValue(key, layers[key][i]));
      else cell.append(layers[key][i] ?? "–");
      cell.className = classes.filter(Boolean).join(" ");
      row.append(cell);
    }
    return row;
  }

  /** Fill the cell of the initial sort key with its value, or with the reason why it has none; return its classes. */
  fillFirst(cell, i) {
    const { layers, scale, first } = this;
    if (layers.status[i] === NOT_COMPARED) return cell.append("not compared"), ["alarm"];
    if (layers.status[i] === IDENTICAL) return cell.append("identical"), ["quiet"];
    const value = layers[first][i];
    if (Number.isNaN(value)) return cell.append("undefined"), ["alarm"];
    if (layers.status[i] === DIFFERS) cell.append(element("i", { class: `swatch h${scale.colour(value)}` }));
    cell.append(formatValue(first, value));
    return [];
  }

  gap(height) {
    const cell = element("td");
    cell.style.height = `${height}px`;
    return element("tr", { class: "gap", "aria-hidden": "true" }, cell);
  }

  note(shown) {
    const text = shown ? `The first ${shown} of ${formatCount(this.order.length, "row")}; all are in the file.` : "None.";
    return element("tr", { class: "gap" }, element("td", {}, text));
  }

  /** Return the rows and columns shown as CSV; an apostrophe disarms formulas. */
  csv() {
    const value = (key, i) => (typeof this.layers[key][i] === "number" && Number.isNaN(this.layers[key][i]) ? "" : this.layers[key][i]);
    const cell = (text) => `"${`${text ?? ""}`.replace(/^(?=[\s"']*[=+\-@＝＋－＠])/, "'").replaceAll('"', '""')}"`;
    const written = (found) => (typeof found === "number" ? `${found}` : cell(found));
    const keys = ["name", "status", ...this.columns.slice(1).map(({ key }) => key)];
    const lines = this.order.map((i) => keys.map((key) => (key === "status" ? cell(STATUSES[this.layers.status[i]]) : written(value(key, i)))).join(","));
    return `${[keys.join(","), ...lines].join("\n")}\n`;
  }

  handleClick(event) {
    const row = event.target.closest("tr[data-place]");
    if (!row) return;
    this.active = Number(row.dataset.place);
    this.open(this.active);
  }

  handleKey(event) {
    if (event.target.closest("thead") || event.ctrlKey || event.altKey || event.metaKey) return;
    const page = Math.max(Math.floor(this.viewport.clientHeight / this.rowHeight) - 2, 1);
    const ends = { Home: 0, End: this.order.length - 1 };
    const steps = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page };
    if (!(event.key in ends) && !(event.key in steps)) return;
    event.preventDefault();
    this.goTo(event.key in ends ? ends[event.key] : this.active + steps[event.key]);
  }

  /** Scroll to a position, make it active and focus it. */
  goTo(place) {
    this.active = Math.min(Math.max(place, 0), this.order.length - 1);
    const height = this.rowHeight;
    const head = byId("columns").offsetHeight;
    const top = this.active * height;
    const bottom = top + height - (this.viewport.clientHeight - head);
    if (this.viewport.scrollTop > top) this.viewport.scrollTop = top;
    else if (this.viewport.scrollTop < bottom) this.viewport.scrollTop = bottom;
    this.draw();
    this.buttonAt(this.active)?.focus({ preventScroll: true });
  }

  buttonAt(place) {
    return this.body.querySelector(`tr[data-place="${place}"] button`);
  }
}

/** Format a value of a column, or a dash if undefined. */
function formatValue(metric, value) {
  if (Number.isNaN(value)) return "–";
  return value === Infinity ? "identical" : METRICS[metric].show(value);
}

/** Offer a file for download. */
function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  const link = element("a", { href: address, download: name });
  link.click();
  URL.revokeObjectURL(address);
}
