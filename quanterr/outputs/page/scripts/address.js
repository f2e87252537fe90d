// The state of the view in the address (#layer=…&q=…), so that links can be shared.

/** Return the parts of the address by key; none for a plain anchor. */
function readAddress() {
  return new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
}

/** Change parts of the address without a history entry; an empty value removes its part. */
function readdress(changes) {
  const parts = readAddress();
  for (const [key, value] of Object.entries(changes)) {
    if (value) parts.set(key, value);
    else parts.delete(key);
  }
  const text = parts.toString();
  if (text || location.hash.includes("=")) history.replaceState(null, "", `#${text}`);
}

/** Open a layer when its name is clicked or the address names it: `open(name)`; apply the filters of the address. */
function followLinks(open, filter) {
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.layer");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open(new URLSearchParams(link.hash.slice(1)).get("layer"));
  });
  const follow = () => {
    const parts = readAddress();
    filter(parts);
    if (parts.has("layer")) open(parts.get("layer"));
  };
  window.addEventListener("hashchange", () => location.hash.includes("=") && follow());
  follow();
}
