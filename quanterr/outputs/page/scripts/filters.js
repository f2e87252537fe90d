// Filters of the table: words or a regular expression, selects, or the layers of a cell, bar or curve.

/** `selects` are [key, title, [value, text] pairs]. Each change updates the table and the address. */
class Filters {
  constructor(table, selects) {
    this.table = table;
    this.keys = selects.map(([key]) => key);
    byId("selects").replaceChildren(
      ...selects.map(([key, title, pairs]) => {
        const select = element("select", { id: key });
        fillSelect(select, [["", "all"], ...pairs]);
        select.addEventListener("change", () => this.apply());
        return element("label", {}, `${title} `, select);
      }),
    );
    byId("search").addEventListener("input", () => this.apply());
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

  apply() {
    const chosen = Object.fromEntries(this.keys.map((key) => [key, byId(key).value]));
    const text = byId("search").value;
    const { matches, problem } = matcherOf(text);
    byId("search").setCustomValidity(problem);
    byId("search").toggleAttribute("aria-invalid", problem !== "");
    this.table.show({ matches, chosen });
    if (problem) byId("count").textContent = problem;
    readdress({ q: text, ...chosen });
  }

  /** Clear all filters, or show only some layers, with a button that names the reason and clears it. */
  reset(rows = null, text = "") {
    for (const key of ["search", ...this.keys]) byId(key).value = "";
    const chip = text ? element("button", { type: "button", class: "chip", "aria-label": `Show all, not only ${text}` }, `${text} ✕`) : null;
    chip?.addEventListener("click", () => {
      this.reset();
      byId("search").focus();
    });
    byId("picked").replaceChildren(...(chip ? [chip] : []));
    this.table.filter.rows = rows;
    this.apply();
  }

  /** Apply the filters in the address. */
  follow(parts) {
    byId("search").value = parts.get("q") ?? "";
    for (const key of this.keys) byId(key).value = parts.get(key) ?? "";
    this.apply();
  }
}

/** Return a matcher of lower-case names for `/regex/` or words that must all occur; !word must not occur. */
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

/** Return the words of a column as pairs for a select. */
function pairsOf(column = []) {
  return [...new Set(column)].filter((word) => word !== null).sort().map((word) => [word, word]);
}

/** Return a function that shows the layers of a cell, bar or curve: one in the drawer, several in the table. */
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

/** Return a function that opens a layer by name, if the report has it. */
function opener(layers, drawer) {
  const rows = new Map(layers.name.map((name, i) => [name, i]));
  return (name) => {
    if (rows.has(name)) drawer.open([rows.get(name)], 0);
  };
}
