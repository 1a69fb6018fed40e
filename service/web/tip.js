// Words with an explanation. It shows while the pointer is over the word or its bubble, or the word has the focus; Escape hides it.

import { el, put } from "/web/show.js";

const EDGE = 8; // to the window
let bubble = null; // one for the page
let explained = null; // the word it stands at

function makeBubble() {
  const made = el("div", "tip");
  Object.assign(made, { id: "tip", role: "tooltip", hidden: true });
  made.addEventListener("pointerleave", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  document.addEventListener("scroll", hide, { passive: true });
  document.getElementsByTagName("main")[0].append(made);
  return made;
}

function show(word, text) {
  bubble ??= makeBubble();
  hide();
  explained = word;
  put(bubble, text);
  bubble.hidden = false;
  word.setAttribute("aria-describedby", bubble.id);
  const at = word.getBoundingClientRect(), size = bubble.getBoundingClientRect();
  bubble.style.left = `${Math.max(EDGE, Math.min(at.left, document.documentElement.clientWidth - size.width - EDGE))}px`;
  bubble.style.top = `${at.bottom + size.height > innerHeight ? at.top - size.height : at.bottom}px`; // so that the pointer can go over to it
}

function hide() {
  if (!explained) return;
  explained.removeAttribute("aria-describedby");
  explained = null;
  bubble.hidden = true;
}

/** The word, as a button that a key, a pointer or a finger reaches; plain text without an explanation. */
export function term(word, text) {
  if (!text) return word;
  const made = el("button", "term", word);
  made.type = "button";
  for (const name of ["pointerenter", "focus", "click"]) made.addEventListener(name, () => show(made, text));
  made.addEventListener("blur", hide);
  made.addEventListener("pointerleave", (event) => { if (event.relatedTarget !== bubble && document.activeElement !== made) hide(); });
  return made;
}
