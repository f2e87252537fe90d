// The table of layers: filtered, sorted, and only the rows that are seen are elements.

const COLUMNS = [
  { key: "name", title: "Layer" },
  { key: "role", title: "Role", wide: true },
  { key: "format", title: "Format", wide: true },
  { key: "shape", title: "Shape", wide: true, number: true },
  { key: "snr_db", title: "SNR dB", number: true },
  { key: "excess_db", title: "Excess dB", wide: true, number: true },
  { key: "relative_error", title: "Rel. %", number: true },
  { key: "mean_absolute_error", title: "Mean |e|", wide: true, number: true },
  { key: "max_absolute_error", title: "Max |e|", wide: true, number: true },
  { key: "bits_per_weight", title: "Bits/w", wide: true, number: true },
];
const EXTRA = 8; // rows above and below those that are seen
const PRINTED = 60; // rows

class LayerTable {
  /** `open(place)` is called with the place in the order of the layer that was chosen. */
  constructor(layers, scale, open) {
    this.layers = layers;
    this.scale = scale;
    this.open = open;
    this.filter = { words: [], status: "", role: "", format: "", rows: null };
    this.sort = { key: "snr_db", worstFirst: true };
    this.order = []; // layers that are shown, in order
    this.active = 0; // place in the order that Tab reaches
    this.viewport = byId("viewport");
    this.body = byId("rows");
    this.makeHead();
    this.viewport.addEventListener("scroll", () => this.draw(), { passive: true });
    this.body.addEventListener("click", (event) => this.clicked(event));
    this.viewport.addEventListener("keydown", (event) => this.pressed(event));
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
      ...COLUMNS.map(({ key, wide }) => element("col", { class: `${key}${wide ? " wide" : ""}` })),
    );
    byId("columns").replaceChildren(
      ...COLUMNS.map(({ key, title, number, wide }) => {
        const button = element("button", { type: "button" }, title);
        button.addEventListener("click", () => this.sortBy(key));
        const classes = [number ? "number" : "", wide ? "wide" : ""].join(" ").trim();
        return element("th", { scope: "col", "data-key": key, class: classes || null }, button);
      }),
    );
  }

  /** Change what is filtered by; says how many there are. */
  show(filter = {}) {
    Object.assign(this.filter, filter);
    const { words, status, role, format, rows } = this.filter;
    const { layers } = this;
    const wanted = (i) =>
      (status === "" || layers.status[i] === Number(status)) &&
      (role === "" || layers.role[i] === role) &&
      (format === "" || layers.format[i] === format) &&
      words.every(({ word, without }) => layers.lower[i].includes(word) !== without);
    const all = rows ?? Array.from({ length: layers.n }, (_, i) => i);
    this.order = all.filter(wanted);
    this.arrange();
    const of = this.order.length === layers.n ? "" : ` of ${layers.n.toLocaleString("en")}`;
    byId("count").textContent = `${this.order.length.toLocaleString("en")}${of} tensors, ${this.sortText()}`;
  }

  sortBy(key) {
    this.sort = { key, worstFirst: this.sort.key === key ? !this.sort.worstFirst : true };
    this.show();
  }

  sortText() {
    const { key, worstFirst } = this.sort;
    const { title } = COLUMNS.find((column) => column.key === key);
    if (key in METRICS) return `${worstFirst ? "the worst" : "the best"} first by ${METRICS[key].title}`;
    return `by ${title.toLowerCase()}${worstFirst ? "" : ", reversed"}`;
  }

  arrange() {
    const { key, worstFirst } = this.sort;
    const rank = key in METRICS ? Float64Array.from({ length: this.layers.n }, (_, i) => -badness(this.layers, key, i)) : this.textRank(key);
    const sign = worstFirst ? 1 : -1;
    this.order.sort((a, b) => (rank[a] === rank[b] ? a - b : rank[a] < rank[b] ? -sign : sign));
    for (const head of byId("columns").cells) {
      const ascending = key in METRICS ? worstFirst === (METRICS[key].better === "higher") : worstFirst;
      if (head.dataset.key === key) head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    this.active = 0;
    this.viewport.scrollTop = 0;
    this.draw();
  }

  /** Place of each layer by a text: names are compared by their numbers, so that 2 comes before 10. */
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

  /** Make the rows that are seen; of a print the first ones. */
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

  rowOf(place) {
    const i = this.order[place];
    const { layers } = this;
    const tabindex = place === this.active ? "0" : "-1";
    const name = element("button", { type: "button", tabindex, title: layers.name[i] }, layers.name[i]);
    const row = element("tr", { "aria-rowindex": place + 2, "data-place": place }, element("th", { scope: "row" }, name));
    for (const { key, number, wide } of COLUMNS.slice(1)) {
      const classes = [number ? "number" : "", wide ? "wide" : ""];
      const cell = element("td");
      if (key === "snr_db") classes.push(...this.fillSnr(cell, i));
      else if (key in METRICS) cell.append(Number.isNaN(layers[key][i]) ? "–" : METRICS[key].show(layers[key][i]));
      else cell.append(layers[key][i] ?? "–");
      cell.className = classes.filter(Boolean).join(" ");
      row.append(cell);
    }
    return row;
  }

  /** The SNR, or why there is none. */
  fillSnr(cell, i) {
    const { layers, scale } = this;
    if (layers.status[i] === NOT_COMPARED) return cell.append("not compared"), ["alarm"];
    if (layers.status[i] === IDENTICAL) return cell.append("identical"), ["quiet"];
    const value = layers.snr_db[i];
    if (Number.isNaN(value)) return cell.append("undefined"), ["alarm"];
    if (layers.status[i] === DIFFERS) cell.append(element("i", { class: `swatch h${scale.colour(value)}` }));
    cell.append(METRICS.snr_db.show(value));
    return [];
  }

  gap(height) {
    const cell = element("td");
    cell.style.height = `${height}px`;
    return element("tr", { class: "gap", "aria-hidden": "true" }, cell);
  }

  note(shown) {
    const text = shown ? `The first ${shown} of ${counted(this.order.length, "row")}; all are in the file.` : "None.";
    return element("tr", { class: "gap" }, element("td", {}, text));
  }

  clicked(event) {
    const row = event.target.closest("tr[data-place]");
    if (!row) return;
    this.active = Number(row.dataset.place);
    this.open(this.active);
  }

  pressed(event) {
    if (event.target.closest("thead") || event.ctrlKey || event.altKey || event.metaKey) return;
    const page = Math.max(Math.floor(this.viewport.clientHeight / this.rowHeight) - 2, 1);
    const ends = { Home: 0, End: this.order.length - 1 };
    const steps = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page };
    if (!(event.key in ends) && !(event.key in steps)) return;
    event.preventDefault();
    this.goTo(event.key in ends ? ends[event.key] : this.active + steps[event.key]);
  }

  /** Make a place in the order the active one, in sight and focused. */
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
