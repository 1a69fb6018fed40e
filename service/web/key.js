// The API key: kept in the tab's session, shown with every request, and the dialog that asks for it.

import { el, put } from "/web/show.js";

const KEY = "tandem-key";

/** Headers that show the key, if there is one. */
export function keyHeaders() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

class KeyDialog {
  constructor(action, hint) {
    this.hint = hint;
    this.why = el("p", "note");
    this.input = el("input");
    this.send = el("button", "pill", action);
    this.node = el("dialog", "", el("h2", "", "This server wants a key"), this.why, this.input, this.send,
      el("p", "note", "It stays in this tab and is forgotten with it."));
    Object.assign(this.node, { id: "key", ariaLabel: "API key" });
    Object.assign(this.why, { id: "key-why", role: "alert" });
    Object.assign(this.input, { id: "key-input", type: "password", autocomplete: "off", spellcheck: false, ariaLabel: "API key" });
    Object.assign(this.send, { id: "key-send", type: "button" });
    this.send.addEventListener("click", () => this.take());
    this.input.addEventListener("keydown", (event) => { if (event.key === "Enter") this.take(); });
  }

  get isOpen() {
    return this.node.open;
  }

  /** Forget the key, and ask for another. `why`: what the server says of the one before. */
  ask(why) {
    const had = sessionStorage.getItem(KEY) !== null;
    sessionStorage.removeItem(KEY);
    put(this.why, had ? why : this.hint);
    if (!this.node.open) this.node.showModal();
  }

  take() {
    const key = this.input.value.trim();
    if (!/^[\x21-\x7e]+$/.test(key)) return put(this.why, "A key is printable, without spaces.");
    sessionStorage.setItem(KEY, key);
    this.input.value = "";
    this.node.close();
  }
}

/** The dialog. `action`: the words of its button; `hint`: which key to give; `onClose`: called when it has closed. */
export function makeKeyDialog(action, hint, onClose) {
  const dialog = new KeyDialog(action, hint);
  document.body.append(dialog.node);
  dialog.node.addEventListener("close", onClose);
  return dialog;
}
