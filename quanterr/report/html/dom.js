// Elements are made here and nowhere else: whatever is shown is text, never markup.

/** An element with attributes and children; strings become text. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** The same of a drawing. */
function shape(svg, name, attributes, ...children) {
  const made = document.createElementNS(svg.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function byId(id) {
  return document.getElementById(id);
}

/** Fill a select element with [value, text] pairs. */
function choices(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => element("option", { value }, text)));
}

/** Only one of several things is reached by Tab; arrow keys lead to the others. `step` finds the next one, or null. */
function roving(container, selector, step) {
  const move = (to) => {
    container.querySelector(`${selector}[tabindex="0"]`)?.setAttribute("tabindex", "-1");
    to.setAttribute("tabindex", "0");
  };
  container.addEventListener("focusin", ({ target }) => target.matches(selector) && move(target));
  container.addEventListener("keydown", (event) => {
    const from = event.target.closest(selector);
    const to = from && step(from, event.key);
    if (!to) return;
    event.preventDefault();
    to.focus();
  });
}

/** A button that goes round the themes. */
function themes() {
  const button = byId("theme");
  const names = ["auto", "light", "dark"];
  let chosen = 0;
  button.addEventListener("click", () => {
    chosen = (chosen + 1) % names.length;
    if (chosen) document.documentElement.dataset.theme = names[chosen];
    else delete document.documentElement.dataset.theme;
    button.textContent = `Theme: ${names[chosen]}`;
  });
}

/** Parts of a strip as wide as their shares. */
function strips() {
  for (const part of document.querySelectorAll(".strip i")) part.style.flexGrow = part.dataset.share;
}

/** What is said where the script cannot work. */
function failed(error) {
  byId("failure").hidden = false;
  byId("failure").textContent = `The table of layers cannot be shown in this browser (${error}). The JSON has all of it.`;
}
