// What is looked at, in the address: #layer=…&q=…, so that a view can be sent to somebody.

/** What the address says, by key; nothing of a plain anchor. */
function addressed() {
  return new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
}

/** Change parts of the address without a step in the history; an empty value takes its part away. */
function readdress(changes) {
  const parts = addressed();
  for (const [key, value] of Object.entries(changes)) {
    if (value) parts.set(key, value);
    else parts.delete(key);
  }
  const text = parts.toString();
  if (text || location.hash.includes("=")) history.replaceState(null, "", `#${text}`);
}

/** Names of layers, wherever they are, open the layer; so does an address that somebody was sent. `open(name)`. */
function followLinks(open, filter) {
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.layer");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open(new URLSearchParams(link.hash.slice(1)).get("layer"));
  });
  const follow = () => {
    const parts = addressed();
    filter(parts);
    if (parts.has("layer")) open(parts.get("layer"));
  };
  window.addEventListener("hashchange", () => location.hash.includes("=") && follow());
  follow();
}
