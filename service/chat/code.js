// Code with colours: pieces of text, and spans with a class. Text goes in as text, and no character is lost or added.

import { el } from "/web/show.js";

const MAX_CHARS = 50_000; // longer code stays plain: it is drawn anew for every token

const words = (text) => new Set(text.split(" "));
const C_LIKE = words("abstract as async await auto bool boolean break byte case catch char class const constexpr continue crate def default "
  + "defer delete do double else enum explicit export extends extern final finally float fn for foreach from func function go goto if impl "
  + "implements import in include inline instanceof int interface internal is let long loop match mod module move mut namespace new "
  + "nil none null nullptr of operator override package private protected pub public range readonly ref return self short signed sizeof "
  + "static string struct super switch template this throw throws trait true false try type typedef typename typeof undefined union unsafe "
  + "unsigned use using val var virtual void volatile when where while yield");
const SCRIPT = words("and alias as assert async await begin break case class continue def del do done elif else elsif end ensure esac except "
  + "export fi finally for from function global if import in is lambda let local match module nonlocal not or pass raise rescue return self "
  + "set source then unless until when while with yield echo cd exit True False None true false null nil on off yes no");
const SQL = words("add all alter and as asc between by case check column constraint create cross database default delete desc distinct drop else "
  + "end exists false foreign from full group having if in index inner insert into is join key left like limit not null offset on or order "
  + "outer primary references returning right select set table then true union unique update values view when where with");
const LITERALS = words("true false null True False yes no on off");

// Each part of an expression keeps what it has read, even without an end: its work grows with the text alone.
const BLOCK = "/\\*[\\s\\S]*?(?:\\*/|$)", SLASH = `//[^\\n]*|${BLOCK}`, DASH = `--[^\\n]*|${BLOCK}`, HASH = "(?<![^\\s;])#[^\\n]*";
const CHARACTER = "'(?:[^'\\\\\\n]|\\\\[^'\\n]{1,8})'", QUOTED = '"(?:[^"\\\\\\n]|\\\\[\\s\\S])*"?', SINGLE = "'(?:[^'\\\\\\n]|\\\\[\\s\\S])*'?";
const TRIPLE = '"""[\\s\\S]*?(?:"""|$)|\'\'\'[\\s\\S]*?(?:\'\'\'|$)', TICKED = "`(?:[^`\\\\]|\\\\[\\s\\S])*`?";
const NUMBER = "\\b(?:0[xX][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b";

/** How languages of one kind are read. */
function family(keywords, comment, strings, { ignoreCase = false } = {}) {
  const parts = [`(?<comment>${comment})`, `(?<string>${strings.join("|")})`, `(?<number>${NUMBER})`, "(?<word>[A-Za-z_$][\\w$]*)"];
  return { keywords, ignoreCase, pattern: new RegExp(parts.join("|"), "g") };
}

const FAMILIES = [
  ["c h cpp c++ cc hpp cs csharp c# cuda java kotlin kt go golang rust rs swift scala dart zig", family(C_LIKE, SLASH, [QUOTED, CHARACTER])],
  ["javascript js jsx mjs typescript ts tsx php", family(C_LIKE, SLASH, [QUOTED, SINGLE, TICKED])],
  ["python py python3 pycon starlark", family(SCRIPT, "#[^\\n]*", [TRIPLE, QUOTED, SINGLE])],
  ["bash sh shell zsh console ruby rb perl pl r julia elixir makefile make dockerfile", family(SCRIPT, HASH, [QUOTED, SINGLE])],
  ["yaml yml toml ini", family(LITERALS, HASH, [QUOTED, SINGLE])],
  ["sql mysql postgresql sqlite", family(SQL, DASH, [SINGLE, QUOTED], { ignoreCase: true })],
  ["lua haskell hs", family(SCRIPT, DASH, [QUOTED, SINGLE])],
  ["json jsonc json5 jsonl", family(LITERALS, SLASH, [QUOTED])],
  ["css scss", family(LITERALS, BLOCK, [QUOTED, SINGLE])],
  ["html xml svg vue", family(LITERALS, "<!--[\\s\\S]*?(?:-->|$)", [QUOTED, SINGLE])],
];
const BY_NAME = new Map(FAMILIES.flatMap(([names, found]) => names.split(" ").map((name) => [name, found])));

function classOf({ groups }, { keywords, ignoreCase }) {
  if (groups.word !== undefined) return keywords.has(ignoreCase ? groups.word.toLowerCase() : groups.word) ? "keyword" : "";
  return groups.comment !== undefined ? "comment" : groups.string !== undefined ? "string" : "number";
}

/** Nodes for `text`; one plain piece where the language is unknown. */
export function coloured(text, language) {
  const found = BY_NAME.get(language.toLowerCase());
  if (!found || text.length > MAX_CHARS) return [text];
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(found.pattern)) {
    const kind = classOf(match, found);
    if (!kind) continue;
    if (match.index > at) nodes.push(text.slice(at, match.index));
    nodes.push(el("span", kind, match[0]));
    at = match.index + match[0].length;
  }
  return at < text.length || !nodes.length ? [...nodes, text.slice(at)] : nodes;
}
