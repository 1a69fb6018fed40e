// Light, dark, or as the system says. The choice is kept for the next visit.

import { put } from "/web/show.js";

const THEME = "tandem-theme", THEMES = ["auto", "light", "dark"];

function setTheme(button, theme) {
  document.documentElement.dataset.theme = theme;
  put(button, theme);
  localStorage.setItem(THEME, theme);
}

/** The button names the theme, and goes on to the next one. */
export function setUpTheme(button) {
  const next = () => THEMES[(THEMES.indexOf(button.textContent) + 1) % THEMES.length];
  button.addEventListener("click", () => setTheme(button, next()));
  setTheme(button, THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : "auto");
}
