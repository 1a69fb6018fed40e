// The Markdown of answers as elements. Text goes in as text: markup of a model's stays visible, and nothing becomes a link or an image.

import { coloured } from "/chat/code.js";
import { el } from "/web/show.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/, HEADING = /^(#{1,6})\s+(.*)$/, ITEM = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)$/, QUOTE = /^>\s?(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(\S(?:.*?\S)?)\*\*|\*([^\s*](?:[^*]*[^\s*])?)\*/gs;

/** Lines as blocks: {kind, text, ...}. A block that the text ends in may still grow. */
export function blocksOf(text) {
  const blocks = [], lines = text.split("\n");
  for (let i = 0; i < lines.length; i++) {
    const fence = FENCE.exec(lines[i]);
    if (fence) i = readCode(lines, i, fence, blocks);
    else if (lines[i].trim() === "") blocks.push(null); // ends what was there
    else addLine(lines[i], blocks);
  }
  return blocks.filter((block) => block !== null);
}

function readCode(lines, start, [, mark, language], blocks) {
  let end = start + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(mark) && lines[end].trim().replaceAll(mark[0], "") === "")) end++;
  blocks.push({ kind: "code", language, text: lines.slice(start + 1, end).join("\n") });
  return end;
}

function addLine(line, blocks) {
  const heading = HEADING.exec(line), item = ITEM.exec(line), quote = QUOTE.exec(line);
  if (heading) blocks.push({ kind: "heading", level: heading[1].length, text: heading[2] });
  else if (item) addItem(item, blocks);
  else if (quote) extend("quote", quote[1], blocks);
  else if (/^\s{2,}\S/.test(line) && blocks.at(-1)?.kind === "list") blocks.at(-1).items.push(`${blocks.at(-1).items.pop()}\n${line.trim()}`);
  else extend("paragraph", line, blocks);
}

function extend(kind, line, blocks) {
  if (blocks.at(-1)?.kind === kind) blocks.at(-1).text += `\n${line}`;
  else blocks.push({ kind, text: line });
}

/** A blank line between two items does not end their list. */
function addItem([, number, text], blocks) {
  const ordered = number !== undefined;
  const last = blocks.at(-1) ?? blocks.at(-2);
  if (last?.kind === "list" && last.ordered === ordered) {
    if (blocks.at(-1) === null) blocks.pop();
    last.items.push(text);
  } else blocks.push({ kind: "list", ordered, start: Number(number ?? 1), items: [text] });
}

function inline(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(at, match.index));
    if (match[2] !== undefined) nodes.push(el("code", "", match[2]));
    else if (match[3] !== undefined) nodes.push(el("strong", "", match[3]));
    else nodes.push(el("em", "", match[4]));
    at = match.index + match[0].length;
  }
  return [...nodes, text.slice(at)].filter((node) => node !== "");
}

function codeBlock({ language, text }) {
  const copy = el("button", "small", "Copy");
  copy.type = "button";
  copy.addEventListener("click", () => copyText(text, copy));
  const pre = el("pre", "", el("code", "", ...coloured(text, language)));
  pre.tabIndex = 0; // it may scroll
  pre.setAttribute("role", "group");
  pre.ariaLabel = language ? `Code, ${language}` : "Code";
  return el("figure", "code", el("figcaption", "", el("span", "", language || "code"), copy), pre);
}

function listOf({ ordered, start, items }) {
  const list = el(ordered ? "ol" : "ul", "", ...items.map((item) => el("li", "", ...inline(item))));
  if (ordered && start !== 1) list.start = start;
  return list;
}

const MAKERS = {
  code: codeBlock,
  list: listOf,
  heading: ({ level, text }) => el("h3", level < 3 ? "major" : "", ...inline(text)),
  quote: ({ text }) => el("blockquote", "", ...inline(text)),
  paragraph: ({ text }) => el("p", "", ...inline(text.trim())),
};

/** Draws a text that grows: blocks that have not changed stay, and with them a selection. */
export class Rendered {
  constructor(node) {
    this.node = node;
    this.keys = [];
  }

  update(text) {
    const blocks = blocksOf(text);
    const keys = blocks.map((block) => JSON.stringify(block));
    const same = keys.findIndex((key, i) => key !== this.keys[i]);
    const kept = same < 0 ? keys.length : same;
    while (this.node.childNodes.length > kept) this.node.lastChild.remove();
    this.node.append(...blocks.slice(kept).map((block) => MAKERS[block.kind](block)));
    this.keys = keys;
  }
}

/** Copies, and says so on the button. */
export async function copyText(text, button) {
  const name = button.textContent;
  button.textContent = (await copied(text)) ? "Copied" : "Cannot copy here";
  setTimeout(() => { button.textContent = name; }, 1500);
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text); // plain HTTP from another machine: browsers give such a page no clipboard
  }
}

function copySelected(text) {
  const field = el("textarea", "unseen", text), before = document.activeElement;
  field.readOnly = true;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  before?.focus();
  return done;
}
