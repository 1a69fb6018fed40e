// Elements and figures. Text always goes in as text: nothing here takes markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with a class, text or children. */
export function el(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** An SVG element with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Write only what has changed: an unchanged page is not laid out again. */
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const digits = (value) => (value >= 100 ? 0 : value >= 10 ? 1 : 2);
const plain = (value, places) => value.toLocaleString("en", { maximumFractionDigits: places });

/** A count or a rate, as "1,234" or "18.1k". */
export function amount(value) {
  if (value >= 1e9) return `${plain(value / 1e9, 2)}G`;
  if (value >= 1e6) return `${plain(value / 1e6, 2)}M`;
  if (value >= 1e4) return `${plain(value / 1e3, value >= 1e5 ? 0 : 1)}k`;
  return plain(value, value >= 1000 ? 0 : digits(value));
}

/** [figure, unit] of a time; "–" without one. */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return ["–", ""];
  if (seconds < 1e-3) return [plain(seconds * 1e6, 0), "µs"];
  if (seconds < 1) return [plain(seconds * 1e3, digits(seconds * 1e3)), "ms"];
  return [plain(seconds, digits(seconds)), "s"];
}

/** [figure, unit] of a share; "–" without one. */
export function percent(share) {
  return [share === null || share === undefined ? "–" : `${plain(share * 100, share < 0.1 ? 1 : 0)}%`, ""];
}

/** [figure, unit] of bytes (a second). */
export function bytes(value, per = "/s") {
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (value >= size) return [plain(value / size, digits(value / size)), unit + per];
  return [plain(value, 0), "B" + per];
}

/** "12.4 ms" */
export const said = ([figure, unit]) => (unit ? `${figure} ${unit}` : figure);

/** host:port of a worker. */
export const nameOf = (url) => url.replace(/^https?:\/\//, "");

/** A figure with a smaller unit behind it, in place of what the node held. */
export function figure(node, [value, unit]) {
  if (node.dataset.shown === value + unit) return;
  node.dataset.shown = value + unit;
  node.replaceChildren(value, el("small", "", unit));
}
