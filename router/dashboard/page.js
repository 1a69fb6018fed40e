// Asks the router for its state every second while the page is visible, and passes it to the parts that draw.

import { makeFlow, modelsOf } from "/dashboard/flow.js";
import { makeTiles } from "/dashboard/charts.js";
import { makeRoles } from "/dashboard/roles.js";
import { makeRequests } from "/dashboard/requests.js";
import { keyHeaders, makeKeyDialog } from "/web/key.js";
import { put } from "/web/show.js";
import { setUpTheme } from "/web/theme.js";

const EVERY_MS = 1000, TIMEOUT_MS = 5000;
const $ = (id) => document.getElementById(id);

const parts = [makeFlow($("flow")), makeRoles($("roles")), makeTiles($("tiles")), makeRequests($("rows"), $("held"), (path, body) => ask(path, body))];
const dialog = makeKeyDialog("Show the cluster", "Give an API key; where the router has admin keys, one of those.", look);
let lastGood = 0, timer = 0, asking = false;

/** GET, or POST where there is a body. */
async function ask(path, body) {
  const headers = keyHeaders();
  const post = body ? { method: "POST", body: JSON.stringify(body) } : {};
  if (body) headers["Content-Type"] = "application/json";
  return fetch(path, { ...post, headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS) });
}

async function look() {
  clearTimeout(timer);
  if (document.hidden || asking || dialog.isOpen) return;
  asking = true;
  let wait = EVERY_MS;
  try {
    wait = await lookOnce();
  } catch (error) {
    // A router that is gone or just starting again: the last picture stays, marked as old.
    setStale(`no answer from the router${lastGood ? ` for ${Math.round((Date.now() - lastGood) / 1000)} s` : ""}`);
  } finally {
    asking = false;
    timer = setTimeout(look, wait);
  }
}

async function lookOnce() {
  const answer = await ask("/dashboard/state");
  if (answer.status === 401 || answer.status === 403) { askKey((await answer.json()).error?.message ?? ""); return EVERY_MS; }
  if (!answer.ok) {
    setStale(`the router answers ${answer.status}`);
    return 1000 * Math.min(60, Number(answer.headers.get("Retry-After")) || 2);
  }
  const state = await answer.json();
  lastGood = Date.now();
  document.body.classList.remove("stale");
  document.querySelector("main").hidden = false;
  summarise(state);
  for (const update of parts) update(state);
  return EVERY_MS;
}

function summarise({ router, workers }) {
  const switching = workers.filter((w) => w.switching_to).length;
  const down = workers.filter((w) => w.health === "down" && !w.switching_to).length;
  const models = modelsOf(workers);
  const words = [
    ...(models.length > 1 ? [`${models.length} models`] : models),
    `${router.running} running`,
    `${workers.length} worker${workers.length === 1 ? "" : "s"}${down ? `, ${down} down` : ""}${switching ? `, ${switching} changing role` : ""}`,
    router.policy,
    ...(router.processes > 1 ? [`${router.processes} router processes`] : []),
    ...["paused", "incompatible"].map((state) => [state, workers.filter((w) => w.health === state).length]).filter(([, n]) => n).map(([state, n]) => `${n} ${state}`),
    ...(router.draining ? ["draining"] : []),
    ...(router.blocked ? ["blocked"] : []),
  ];
  put($("summary"), words.join(" · "));
  $("summary").classList.toggle("bad", down > 0 || router.draining || router.blocked);
  document.title = `${router.running} running · Tandem`;
}

function setStale(why) {
  document.body.classList.add("stale");
  put($("summary"), why);
}

function askKey(why) {
  put($("summary"), "waiting for a key");
  dialog.ask(why);
}

document.addEventListener("visibilitychange", look);
setUpTheme($("theme"));
look();
