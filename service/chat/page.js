// Owns the conversation and the message that is written.

import { isRouter, listModels } from "/chat/api.js";
import { Exchange } from "/chat/exchange.js";
import { Memory } from "/chat/memory.js";
import { Attachments, takesPictures } from "/chat/pictures.js";
import { keyHeaders, makeKeyDialog } from "/web/key.js";
import { el, put, svg } from "/web/show.js";
import { setUpTheme } from "/web/theme.js";

const DEFAULT_MAX_TOKENS = 1024; // at most half of what the model's context holds
const NEAR_END = 80; // pixels from which on the page follows an answer
const EXAMPLES = ["What is the capital of France? Answer in one sentence.", "Explain in three sentences why the sky is blue.",
  "Write a haiku about two machines that work as one."];
const RECALL = { // the models that ship with Tandem, which know no language
  about: "This test model knows no language, only words such as k17 and v42. It answers with the word that followed the last one earlier.",
  examples: ["k17 v42 k03 v91 k17", "k05 v11 k06 v12 k07 v13 k06", "k20 v77 k21 v78 k20"],
};
const HINTS = {
  ready: "Enter sends · Shift+Enter starts a line",
  running: "Esc stops",
  editing: "Enter asks this instead and drops what came after · Esc leaves all as it is",
};
const KEPT_FIELDS = ["model", "temperature", "max-tokens", "system"];
const $ = (id) => document.getElementById(id);

const memory = new Memory();
const exchanges = [];
let models = []; // of the server
let wanted = ""; // the model that was chosen, also while the server does not list it
let editing = null; // the exchange whose question is written anew
let following = true;
let refused = ""; // why a file was not taken
let shortened = false; // the oldest exchanges are lost
let left = false; // for another page

const attachments = new Attachments($("attached"), { onChange: () => { refused = ""; showState(); }, onError: (why) => { refused = why; showState(); } });
const dialog = makeKeyDialog("Use this key", "Give an API key of this server.", () => { if (keyHeaders().Authorization) showModels(); $("message").focus(); });

const running = () => exchanges.find((exchange) => exchange.isRunning) ?? null;

// Models and settings

async function showModels() {
  try {
    models = await listModels();
    $("model").replaceChildren(...models.map(({ id, parent }) => new Option(parent ? `${id} (adapter of ${parent})` : id, id)));
    if (models.some(({ id }) => id === wanted)) $("model").value = wanted;
    setStatus(models.length ? "" : "no model is here yet");
  } catch (error) {
    onError(error);
  }
  showModel();
}

const chosenModel = () => models.find(({ id }) => id === $("model").value) ?? null;
const defaultMaxTokens = () => Math.min(DEFAULT_MAX_TOKENS, Math.floor((chosenModel()?.max_model_len ?? Infinity) / 2));

/** What follows from the model: a limit that fits, examples, whether pictures can be attached. */
function showModel() {
  if (!$("max-tokens").dataset.chosen) $("max-tokens").value = defaultMaxTokens();
  const recalls = chosenModel()?.id.startsWith("recall") ?? false;
  $("about").hidden = !recalls;
  put($("about"), RECALL.about);
  put($("welcome"), recalls ? "Ask it to recall." : "Ask anything.");
  document.querySelector(".examples").replaceChildren(...(recalls ? RECALL.examples : EXAMPLES).map(exampleButton));
  $("attach").hidden = !takesPictures(chosenModel());
  showChosen();
}

function exampleButton(text) {
  const button = el("button", "pill", text);
  button.type = "button";
  button.addEventListener("click", () => { ask(text, []); $("message").focus(); });
  return button;
}

function onError(error) {
  setStatus(error.wantsKey ? "waiting for a key" : error.message, true);
  if (error.wantsKey) dialog.ask(error.message);
}

function setStatus(text, bad = false) {
  put($("summary"), text || "ready");
  $("summary").classList.toggle("bad", bad);
}

const numberIn = (id) => ($(id).value === "" || !$(id).checkValidity() ? null : Number($(id).value));

function showChosen() {
  const words = [$("model").value];
  if (numberIn("temperature") !== null) words.push(`temperature ${numberIn("temperature")}`);
  if (numberIn("max-tokens") !== null) words.push(`at most ${numberIn("max-tokens")} tokens`);
  if ($("system").value.trim()) words.push("a system prompt");
  put($("chosen"), words.filter((word) => word !== "").join(" · "));
}

function onSetting({ target }) {
  if (target === $("max-tokens")) target.dataset.chosen = "yes";
  if (target === $("model")) wanted = target.value;
  showModel();
}

/** The request's body but for its messages; fields that are empty are left to the model. */
function settings() {
  const temperature = numberIn("temperature"), most = numberIn("max-tokens");
  return { model: $("model").value || "default", ...(temperature === null ? {} : { temperature }), ...(most === null ? {} : { max_tokens: most }) };
}

function messagesTo(exchange) {
  const system = $("system").value.trim();
  const before = exchanges.slice(0, exchanges.indexOf(exchange));
  const taken = takesPictures(chosenModel());
  return [...(system ? [{ role: "system", content: system }] : []), ...before.flatMap((earlier) => earlier.messages(taken)), exchange.asked(taken)];
}

// What the browser keeps

function keep() {
  if (left) return;
  const values = KEPT_FIELDS.map((id) => [id, id === "model" ? wanted : $(id).value]);
  const limit = $("max-tokens").dataset.chosen ? {} : { "max-tokens": null };
  const kept = memory.save({ settings: { ...Object.fromEntries(values), ...limit }, exchanges: exchanges.map((exchange) => exchange.kept()), shortened });
  if (!kept) put($("storage"), "This browser keeps nothing for this page: the chat ends with its tab.");
}

function restore({ settings: values = {}, exchanges: kept, shortened: isShort }) {
  for (const id of KEPT_FIELDS) if (typeof values[id] === "string") $(id).value = values[id];
  if (typeof values["max-tokens"] === "string") $("max-tokens").dataset.chosen = "yes";
  wanted = values.model ?? "";
  shortened = Boolean(isShort);
  for (const each of kept) {
    try {
      exchanges.push(Exchange.from(each, { onEdit: edit, onAgain: again }));
    } catch {
      continue; // not one of ours
    }
    $("exchanges").append(exchanges.at(-1).node);
  }
}

// The conversation

async function run(exchange) {
  following = true;
  const answered = exchange.run({ ...settings(), messages: messagesTo(exchange) });
  showState();
  keep();
  await answered;
  showState();
  if (!exchanges.includes(exchange)) return; // a new chat has begun
  announce(exchange);
  keep();
  if (exchange.failure?.wantsKey) onError(exchange.failure);
  await exchange.findWorkers();
  if (exchanges.includes(exchange)) keep();
}

/** For screen readers, once: what is read while it grows is read in pieces. */
function announce(exchange) {
  const ends = { done: "Answer: ", stopped: "Stopped. Answer so far: ", failed: "Failed: " };
  put($("announcer"), ends[exchange.state] + (exchange.failure?.message ?? exchange.said.textContent));
}

function send() {
  const question = $("message").value.trim();
  if ((question === "" && !attachments.list.length) || running()) return;
  const pictures = attachments.take();
  if (editing) dropFrom(editing);
  setEditing(null, "");
  ask(question, pictures);
}

function ask(question, pictures) {
  const exchange = new Exchange(question, pictures, { onEdit: edit, onAgain: again });
  exchanges.push(exchange);
  $("exchanges").append(exchange.node);
  run(exchange);
}

function again(exchange) {
  if (running()) return;
  $("message").focus();
  run(exchange);
}

function edit(exchange) {
  if (running()) return;
  setEditing(exchange, exchange.question);
  $("message").focus();
}

function setEditing(exchange, text) {
  editing = exchange;
  const from = editing ? exchanges.indexOf(editing) : Infinity;
  exchanges.forEach((each, i) => each.node.classList.toggle("dropped", i >= from));
  $("message").value = text;
  attachments.set(editing ? editing.pictures : []);
}

function dropFrom(exchange) {
  for (const gone of exchanges.splice(exchanges.indexOf(exchange))) gone.node.remove();
}

function startAnew() {
  running()?.stop();
  if (exchanges.length) dropFrom(exchanges[0]);
  shortened = false;
  memory.forget();
  put($("announcer"), "A new chat");
  setEditing(null, "");
  $("message").focus();
}

/** What the page looks like follows from what runs and what is edited. */
function showState() {
  const runs = running() !== null;
  $("empty").hidden = exchanges.length > 0;
  $("shortened").hidden = !shortened;
  put($("send"), runs ? "Stop" : "Send");
  $("send").classList.toggle("stop", runs);
  put($("hint"), refused || HINTS[runs ? "running" : editing ? "editing" : "ready"]);
  $("hint").classList.toggle("bad", refused !== "");
  fit();
}

/** The message is as high as its text, up to what the style allows. */
function fit() {
  $("message").style.height = "auto";
  $("message").style.height = `${$("message").scrollHeight + 2}px`;
  follow();
}

function follow() {
  if (following && exchanges.length) scrollTo(0, document.documentElement.scrollHeight);
}

function onEscape() {
  if (running()) running().stop();
  else if (editing) setEditing(null, "");
}

/** Files that were chosen, pasted or dropped. */
function takeFiles(event, list) {
  if (!list?.length) return;
  event.preventDefault();
  attachments.offer(list, takesPictures(chosenModel()));
}

$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("message").addEventListener("input", () => { refused = ""; showState(); });
$("send").addEventListener("click", () => { running() ? running().stop() : send(); $("message").focus(); });
$("attach").append(svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: "M19 11.5 12.2 18a4.2 4.2 0 0 1-5.9-6l7.4-7.2a2.8 2.8 0 0 1 3.9 4l-7.3 7.1a1.4 1.4 0 0 1-2-2l6.4-6.2" })));
$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", (event) => { takeFiles(event, $("files").files); $("files").value = ""; $("message").focus(); });
document.addEventListener("paste", (event) => takeFiles(event, event.clipboardData?.files));
document.addEventListener("drop", (event) => takeFiles(event, event.dataTransfer?.files));
document.addEventListener("dragover", (event) => { if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); });
$("new").addEventListener("click", startAnew);
$("key-open").addEventListener("click", () => dialog.ask(""));
$("settings").addEventListener("input", onSetting);
$("settings").addEventListener("change", () => { if (exchanges.length) keep(); });
$("exchanges").addEventListener("grown", follow);
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !dialog.isOpen) onEscape(); });
document.addEventListener("scroll", () => {
  following = document.documentElement.scrollHeight - innerHeight - scrollY < NEAR_END;
});
addEventListener("pagehide", () => {
  if (running()) keep(); // only then: another tab may have gone on with what is kept
  left = true; // the answer breaks off now, which is no failure
});
addEventListener("pageshow", () => { left = false; });
isRouter().then((is) => { for (const node of document.querySelectorAll(".of-router")) node.hidden = !is; });
setUpTheme($("theme"));
if (memory.found) restore(memory.found);
showState();
showModels();
if (!matchMedia("(pointer: coarse)").matches) $("message").focus(); // elsewhere a keyboard would cover the page
