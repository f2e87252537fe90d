// Which layers the table shows: by words or a regular expression, by selects, or those of a cell, a bar or a curve.

/** `selects` are [key, title, [value, text] pairs]. Every change goes to the table and into the address. */
class Filters {
  constructor(table, selects) {
    this.table = table;
    this.keys = selects.map(([key]) => key);
    byId("selects").replaceChildren(
      ...selects.map(([key, title, pairs]) => {
        const select = element("select", { id: key });
        choices(select, [["", "all"], ...pairs]);
        select.addEventListener("change", () => this.changed());
        return element("label", {}, `${title} `, select);
      }),
    );
    byId("search").addEventListener("input", () => this.changed());
    byId("search").addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "Enter") table.goTo(0);
      if (event.key === "ArrowDown") event.preventDefault();
    });
    byId("reset").addEventListener("click", () => this.reset());
    document.addEventListener("keydown", (event) => {
      const typing = event.target.closest("input, select, textarea, dialog");
      if (event.key !== "/" || typing || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      byId("search").focus();
    });
  }

  changed() {
    const chosen = Object.fromEntries(this.keys.map((key) => [key, byId(key).value]));
    const text = byId("search").value;
    const { matches, problem } = matcherOf(text);
    byId("search").setCustomValidity(problem);
    byId("search").toggleAttribute("aria-invalid", problem !== "");
    this.table.show({ matches, chosen });
    if (problem) byId("count").textContent = problem;
    readdress({ q: text, ...chosen });
  }

  /** No filter; or only some layers, with the reason on a button that takes it away. */
  reset(rows = null, text = "") {
    for (const key of ["search", ...this.keys]) byId(key).value = "";
    const chip = text ? element("button", { type: "button", class: "chip", "aria-label": `Show all, not only ${text}` }, `${text} ✕`) : null;
    chip?.addEventListener("click", () => {
      this.reset();
      byId("search").focus();
    });
    byId("picked").replaceChildren(...(chip ? [chip] : []));
    this.table.filter.rows = rows;
    this.changed();
  }

  /** What an address asks for. */
  follow(parts) {
    byId("search").value = parts.get("q") ?? "";
    for (const key of this.keys) byId(key).value = parts.get(key) ?? "";
    this.changed();
  }
}

/** What a text selects: `/regex/`, or words that all occur; those with ! must not. `matches(lower case name)`. */
function matcherOf(text) {
  const regex = /^\/(.+)\/$/.exec(text.trim());
  if (regex) {
    try {
      const expression = new RegExp(regex[1], "i");
      return { matches: (name) => expression.test(name), problem: "" };
    } catch (error) {
      return { matches: () => false, problem: `Not a regular expression: ${error.message}` };
    }
  }
  const words = text.toLowerCase().split(/\s+/).map((word) => [word.replace(/^!/, ""), word.startsWith("!")]);
  const wanted = words.filter(([word]) => word);
  return { matches: (name) => wanted.every(([word, without]) => name.includes(word) !== without), problem: "" };
}

/** Words of a column as pairs for a select. */
function pairsOf(column = []) {
  return [...new Set(column)].filter((word) => word !== null).sort().map((word) => [word, word]);
}

/** Shows the layers of a cell, a bar or a curve: a single one in the drawer, several in the table. */
function picker(table, filters, drawer) {
  return (text, rows) => {
    if (rows.length === 1) {
      drawer.open(rows, 0);
      return;
    }
    filters.reset(rows, text);
    byId("layers").scrollIntoView();
    table.goTo(0);
  };
}

/** Opens a layer by its name, which a report may not have. */
function opener(layers, drawer) {
  const rows = new Map(layers.name.map((name, i) => [name, i]));
  return (name) => {
    if (rows.has(name)) drawer.open([rows.get(name)], 0);
  };
}
