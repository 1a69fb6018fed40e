// What the browser keeps of a chat. Each tab has a copy of its own, which a reload brings back. The last one that was written,
// in any tab, is what a new tab starts with. So two open tabs never write into each other's chat.

import { newId } from "/chat/api.js";

const PLACE = "tandem-chat", VERSION = 1;
export const MAX_CHARS = 2e6; // of one chat; browsers give a page some 5 million

/** {id, settings, exchanges, shortened}, or null where nothing usable is stored. */
function read(store) {
  try {
    const kept = JSON.parse(store.getItem(PLACE));
    return kept?.version === VERSION && Array.isArray(kept.exchanges) ? kept : null;
  } catch {
    return null; // not ours, or storage is blocked
  }
}

function write(store, text) {
  try {
    store.setItem(PLACE, text);
    return true;
  } catch {
    return false; // full, or storage is blocked
  }
}

/** The chat as text of at most `most` characters. Pictures of the oldest exchanges go first, then the oldest exchanges. */
export function shorten(chat, most = MAX_CHARS) {
  const { exchanges, shortened, ...rest } = chat;
  const head = (short) => JSON.stringify({ ...rest, version: VERSION, shortened: short }).slice(0, -1);
  const texts = exchanges.map((each) => JSON.stringify(each));
  let total = texts.reduce((sum, text) => sum + text.length + 1, head(true).length + '"exchanges":[]}'.length + 1);
  const put = (i, text) => { total -= texts[i].length - text.length; texts[i] = text; };
  for (let i = 0; i < texts.length && total > most; i++)
    if (exchanges[i].pictures.length) put(i, JSON.stringify({ ...exchanges[i], pictures: [], lost: exchanges[i].pictures.length }));
  let first = 0;
  while (first < texts.length && total > most) total -= texts[first++].length + 1;
  return `${head(shortened || first > 0)},"exchanges":[${texts.slice(first).join(",")}]}`;
}

export class Memory {
  constructor() {
    const own = read(sessionStorage);
    this.found = own ?? read(localStorage);
    this.id = this.found?.id ?? newId();
    this.isCopy = own === null && this.found !== null; // another tab may go on with it
  }

  /** Whether it could be kept. `chat`: {settings, exchanges, shortened}, in plain values. */
  save(chat) {
    if (this.isCopy) this.id = newId();
    this.isCopy = false;
    const text = shorten({ ...chat, id: this.id });
    const kept = write(sessionStorage, text);
    return write(localStorage, text) && kept;
  }

  /** Forget this chat; the chat of another tab stays, and does not come back here. */
  forget() {
    if (read(localStorage)?.id === this.id) write(localStorage, "");
    this.id = newId();
    this.isCopy = false;
    write(sessionStorage, shorten({ id: this.id, settings: {}, exchanges: [] }));
  }
}
