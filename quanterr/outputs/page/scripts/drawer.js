// A dialog with the details of a layer, and keys to the previous and next one.

class Drawer {
  /** `contents(i)` returns the elements below the name of layer i. */
  constructor(layers, contents) {
    this.layers = layers;
    this.contents = contents;
    this.dialog = byId("details");
    byId("close").addEventListener("click", () => this.dialog.close());
    byId("previous").addEventListener("click", () => this.show(this.place - 1));
    byId("next").addEventListener("click", () => this.show(this.place + 1));
    byId("copy-name").addEventListener("click", ({ target }) => copy(layers.name[this.order[this.place]], target));
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
    this.dialog.addEventListener("close", () => {
      readdress({ layer: "" });
      this.back(this.place);
    });
    this.dialog.addEventListener("keydown", (event) => {
      const by = { j: 1, k: -1 }[event.key];
      if (by) this.show(this.place + by);
    });
  }

  /** Show a layer by its position in an order; `back(place)` is called with the last position when the dialog closes. */
  open(order, place, back = () => {}) {
    this.order = order;
    this.back = back;
    this.show(place);
  }

  show(place) {
    const { order, layers } = this;
    if (place < 0 || place >= order.length) return;
    this.place = place;
    byId("details-position").textContent = `${(place + 1).toLocaleString("en")} of ${order.length.toLocaleString("en")}`;
    byId("previous").disabled = place === 0;
    byId("next").disabled = place === order.length - 1;
    const name = element("h2", { id: "details-name" }, layers.name[order[place]]);
    byId("details-body").replaceChildren(name, ...this.contents(order[place]));
    byId("details-body").scrollTop = 0;
    if (!this.dialog.open) this.dialog.showModal();
    byId("details-body").focus({ preventScroll: true });
    readdress({ layer: layers.name[order[place]] });
  }
}

function plainTable(title, heads, rows) {
  const made = element("table", { class: "plain" });
  if (heads) made.append(element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col", class: "number" }, head)))));
  made.append(element("tbody", {}, ...rows));
  return element("div", {}, element("h3", {}, title), element("div", { class: "scroll" }, made));
}

function numbers(...texts) {
  return element("tr", {}, ...texts.map((text) => element("td", { class: "number" }, `${text}`)));
}

/** Return a list of titles and texts. */
function facts(rows) {
  return element(
    "dl", { class: "facts" },
    ...rows.flatMap(([title, text]) => [element("dt", {}, title), element("dd", {}, text ?? "–")]),
  );
}

/** Format a number of the details. */
function figure(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6 ? `${value}` : scientific(value);
}
