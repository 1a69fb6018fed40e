// Owns the conversation and the message that is written. Both end with the page: nothing is stored.

import { isRouter, listModels } from "/chat/api.js";
import { Exchange } from "/chat/exchange.js";
import { keyHeaders, makeKeyDialog } from "/web/key.js";
import { el, put } from "/web/show.js";
import { setUpTheme } from "/web/theme.js";

const BEGINNINGS = ["What is the capital of France?", "Explain in three sentences why the sky is blue.", "Write a haiku about two machines that work as one."];
const HINTS = {
  ready: "Enter sends · Shift+Enter begins a line",
  running: "Esc stops",
  editing: "Enter asks this instead, and drops what came after · Esc leaves all as it is",
};
const NEAR_END = 80; // pixels from which on the page follows an answer
const $ = (id) => document.getElementById(id);

const exchanges = [];
let editing = null; // the exchange whose question is written anew
let following = true;
const dialog = makeKeyDialog("Use this key", "Give an API key of this server.", () => { if (keyHeaders().Authorization) showModels(); $("message").focus(); });

const running = () => exchanges.find((exchange) => exchange.isRunning) ?? null;

// Models and settings

async function showModels() {
  try {
    const models = await listModels();
    const before = $("model").value;
    $("model").replaceChildren(...models.map(({ id, parent }) => new Option(parent ? `${id} (adapter of ${parent})` : id, id)));
    if (models.some(({ id }) => id === before)) $("model").value = before;
    setStatus(models.length ? "" : "no model is here yet");
  } catch (error) {
    onError(error);
  }
  showChosen();
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

/** The request's body but for its messages; fields that are empty are left to the model. */
function settings() {
  const temperature = numberIn("temperature"), most = numberIn("max-tokens");
  return { model: $("model").value || "default", ...(temperature === null ? {} : { temperature }), ...(most === null ? {} : { max_tokens: most }) };
}

function historyBefore(exchange) {
  const system = $("system").value.trim();
  const before = exchanges.slice(0, exchanges.indexOf(exchange));
  return [...(system ? [{ role: "system", content: system }] : []), ...before.flatMap((earlier) => earlier.messages())];
}

// The conversation

async function run(exchange) {
  following = true;
  const answered = exchange.run(settings(), historyBefore(exchange));
  showState();
  await answered;
  showState();
  if (!exchanges.includes(exchange)) return; // a new chat has begun
  announce(exchange);
  if (exchange.failure?.wantsKey) onError(exchange.failure);
}

/** For screen readers, once: what is read while it grows is read in pieces. */
function announce(exchange) {
  const ends = { done: "Answer: ", stopped: "Stopped. Answer so far: ", failed: "Failed: " };
  put($("announcer"), ends[exchange.state] + (exchange.failure?.message ?? exchange.said.textContent));
}

function send() {
  const question = $("message").value.trim();
  if (question === "" || running()) return;
  if (editing) dropFrom(editing);
  setEditing(null, "");
  ask(question);
}

function ask(question) {
  const exchange = new Exchange(question, { onEdit: edit, onAgain: again });
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
  showState();
}

function dropFrom(exchange) {
  for (const gone of exchanges.splice(exchanges.indexOf(exchange))) gone.node.remove();
}

function startAnew() {
  running()?.stop();
  if (exchanges.length) dropFrom(exchanges[0]);
  put($("announcer"), "A new chat");
  setEditing(null, "");
  $("message").focus();
}

/** What the page looks like follows from what runs and what is edited. */
function showState() {
  const runs = running() !== null;
  $("empty").hidden = exchanges.length > 0;
  put($("send"), runs ? "Stop" : "Send");
  $("send").classList.toggle("stop", runs);
  put($("hint"), HINTS[runs ? "running" : editing ? "editing" : "ready"]);
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

$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("message").addEventListener("input", fit);
$("send").addEventListener("click", () => { running() ? running().stop() : send(); $("message").focus(); });
$("new").addEventListener("click", startAnew);
$("key-open").addEventListener("click", () => dialog.ask(""));
$("settings").addEventListener("input", showChosen);
$("exchanges").addEventListener("grown", follow);
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !dialog.isOpen) onEscape(); });
document.addEventListener("scroll", () => {
  following = document.documentElement.scrollHeight - innerHeight - scrollY < NEAR_END;
});
document.querySelector(".beginnings").append(...BEGINNINGS.map((text) => {
  const button = el("button", "pill", text);
  button.type = "button";
  button.addEventListener("click", () => { ask(text); $("message").focus(); });
  return button;
}));
isRouter().then((is) => { for (const node of document.querySelectorAll(".of-router")) node.hidden = !is; });
setUpTheme($("theme"));
showState();
showModels();
if (!matchMedia("(pointer: coarse)").matches) $("message").focus(); // elsewhere a keyboard would cover the page
