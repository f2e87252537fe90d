// Creates all elements: everything shown is text, never markup.

/** Return an element with attributes and children; strings become text. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Return an SVG element with attributes and children. */
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
function fillSelect(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => element("option", { value }, text)));
}

/** Let Tab reach one of several elements, and arrow keys move between them; `step` returns the next one or null. */
function addRovingFocus(container, selector, step) {
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

/** Remove links to sections that have nothing to show. */
function dropDeadLinks() {
  for (const link of document.querySelectorAll("nav a")) if (byId(link.hash.slice(1))?.hidden) link.remove();
}

/** Let the theme button cycle through the themes. */
function addThemeButton() {
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

/** Size the parts of strips by their shares. */
function sizeStrips() {
  for (const part of document.querySelectorAll(".strip i")) part.style.flexGrow = part.dataset.share;
}

/** Show that the script cannot work. */
function showFailure(error) {
  byId("failure").hidden = false;
  byId("failure").textContent = `The table of layers cannot be shown in this browser (${error}). The JSON report has all layers.`;
}

/** Copy text to the clipboard; the button shows whether that worked. */
async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Cannot copy here";
  }
  button.addEventListener("blur", () => (button.textContent = before), { once: true });
}

/** Let a button next to a command copy it. */
function addCopyButtons() {
  for (const button of document.querySelectorAll(".command button")) {
    button.addEventListener("click", () => copy(button.previousElementSibling.textContent, button));
  }
}
