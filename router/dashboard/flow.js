// The picture of requests on their way: workers as cards, links between them, a dot for each request. Owns all of it.
//
// A dot's place follows from its request's marks and the time shown, which lies a little behind: so what the page hears of
// once a second moves evenly, and a request that took 20 ms is still seen to pass.

import { amount, bytes, el, figure, nameOf, percent, put, said, svg } from "/web/show.js";
import { QUEUES } from "/web/stages.js";
import { answeringOf } from "/web/timeline.js";
import { term } from "/web/tip.js";

const BEHIND_S = 1.5, TRAVEL_S = 0.45, STAY_S = 0.25;
const MAX_DOTS = 72, MAX_CARDS = 8, RAIL = 22;

const SIZES = ["tp", "pp", "dp"]; // of ranks
const LATE = "retracted"; // a queue that is shown where it holds requests

class Card {
  constructor(worker) {
    this.url = worker.url;
    this.name = el("span", "name", nameOf(worker.url));
    this.health = el("span", "health");
    this.bar = el("span", "bar");
    this.sizes = el("span", "sizes");
    this.usage = el("span", "usage");
    this.counts = el("span", "counts");
    this.cache = el("span", "cache");
    this.model = el("p", "note model");
    this.dock = el("div", "dock");
    this.node = el("article", "card", el("p", "head", this.health, this.name, this.sizes, this.usage), el("span", "track", this.bar),
      el("p", "note", this.counts, this.cache), this.model, this.dock);
    this.node.dataset.url = worker.url;
  }

  update(worker, severalModels) {
    const { report, switching_to: next } = worker;
    const health = next ? "switching" : worker.health;
    this.node.dataset.health = health;
    const { ranks } = worker;
    const several = SIZES.filter((name) => ranks[name] > 1);
    put(this.sizes, several.map((name) => `${name.toUpperCase()} ${ranks[name]}`).join(" · "));
    const pids = several.length && ranks.pids.length ? `ranks: pid ${ranks.pids.join(", ")}` : "";
    this.node.title = [worker.url, worker.models.join(", "), worker.error, pids].filter((text) => text).join("\n");
    const share = report && report.capacity_tokens ? report.used_tokens / report.capacity_tokens : null;
    put(this.usage, next ? `→ ${next}` : health !== "up" ? health : share === null ? "" : `${worker.role === "encode" ? "features" : "KV"} ${(share * 100).toFixed(share < 0.1 ? 1 : 0)}%`);
    this.bar.style.width = `${Math.min(1, share ?? 0) * 100}%`;
    put(this.counts, this.said(worker));
    const hits = worker.role !== "decode" && report?.cached_tokens_total ? report.cached_tokens_total / report.prompt_tokens_total : null;
    put(this.cache, hits === null ? "" : `cache hits ${said(percent(hits))}`);
    put(this.model, severalModels ? worker.models[0] ?? "" : "");
  }

  /** Where requests stand there, by the worker's own word; else what the router has sent and not got back. */
  said(worker) {
    if (worker.switching_to) return worker.inflight_requests ? `ends what it has: ${worker.inflight_requests}` : "starts in its new role";
    const rests = ["down", "starting", "incompatible"].includes(worker.health) || (worker.health === "draining" && !worker.inflight_requests);
    if (rests && worker.error) return worker.error;
    if (["down", "starting"].includes(worker.health)) return "not checked yet";
    if (!worker.report) return `${worker.inflight_requests} in flight, reports no load`;
    const { stages } = worker.report;
    const shown = Object.keys(QUEUES[worker.role]).filter((stage) => stages[stage] > 0);
    const sent = worker.inflight_requests ? `${worker.inflight_requests} in flight` : "idle";
    return shown.map((stage) => `${stages[stage]} ${stage}`).join(" · ") || sent;
  }
}

class Lane {
  constructor(node) {
    this.node = node;
    this.stages = node.querySelector(".stages");
    this.box = node.querySelector(".cards");
    this.cards = new Map();
    this.more = el("p", "note more");
    this.order = "";
  }

  /** Whether cards came or went. */
  update(workers, role, severalModels) {
    const shown = workers.length > MAX_CARDS ? busiest(workers) : workers;
    const order = shown.map((w) => w.url).join(" ");
    const changed = order !== this.order;
    if (changed) {
      const before = this.cards;
      this.cards = new Map(shown.map((w) => [w.url, before.get(w.url) ?? new Card(w)]));
      this.box.replaceChildren(...[...this.cards.values()].map((card) => card.node), this.more);
      this.order = order;
    }
    for (const worker of shown) this.cards.get(worker.url).update(worker, severalModels);
    put(this.more, workers.length > shown.length ? `and ${workers.length - shown.length} more` : shown.length ? "" : "no workers");
    this.countStages(workers, role);
    return changed;
  }

  countStages(workers, role) {
    const total = (stage) => workers.reduce((sum, w) => sum + (w.report?.stages[stage] ?? 0), 0);
    const wanted = Object.keys(QUEUES[role]).filter((stage) => stage !== LATE || total(stage));
    if (this.stages.children.length !== wanted.length)
      this.stages.replaceChildren(...wanted.map((stage) => el("li", "", el("b"), el("span", "", term(stage, QUEUES[role][stage])))));
    wanted.forEach((stage, i) => {
      put(this.stages.children[i].firstChild, String(total(stage)));
      this.stages.children[i].dataset.stage = stage;
      this.stages.children[i].classList.toggle("some", total(stage) > 0);
    });
  }
}

/** Models that workers serve, each once. */
export function modelsOf(workers) {
  return [...new Set(workers.map((w) => w.models[0] ?? "").filter((name) => name !== ""))].sort();
}

/** The fullest and what is not well, in the order of the table. */
function busiest(workers) {
  const rank = (w) => (w.health === "up" ? 0 : 1e12) + w.inflight_tokens;
  const kept = new Set([...workers].sort((a, b) => rank(b) - rank(a) || (a.url < b.url ? -1 : 1)).slice(0, MAX_CARDS));
  return workers.filter((w) => kept.has(w));
}

class Flow {
  constructor(section) {
    this.section = section;
    const find = (id) => section.querySelector(`#${id}`);
    this.links = find("links");
    this.roads = this.links.appendChild(svg("g"));
    this.below = this.links.appendChild(svg("g")); // dots that travel, behind the cards
    this.above = find("dots"); // dots that stand in them
    this.lanes = { prefill: new Lane(find("prefill")), decode: new Lane(find("decode")), alone: new Lane(find("alone")), encode: new Lane(find("encode")) };
    this.nodes = Object.fromEntries(["arrivals", "answers", "crossing", "arrivals-figure", "arrivals-note", "answers-figure",
      "answers-note", "crossing-figure"].map((id) => [id, find(id)]));
    this.dots = new Map();
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.places = new Map();
    this.offset = null;
    new ResizeObserver(() => this.measure()).observe(section);
    requestAnimationFrame((at) => this.frame(at));
  }

  update(state) {
    const { workers, router, window } = state;
    const unified = !router.pd;
    this.section.classList.toggle("unified", unified);
    this.section.classList.toggle("mixed", router.mixed);
    const of = (role) => workers.filter((w) => w.role === role);
    const several = modelsOf(workers).length > 1;
    if (unified) this.lanes.decode.update(of("unified"), "unified", several);
    else for (const role of ["prefill", "decode"]) this.lanes[role].update(of(role), role, several);
    if (router.mixed) this.lanes.alone.update(of("unified"), "unified", several);
    this.section.classList.toggle("encoding", of("encode").length > 0);
    this.lanes.encode.update(of("encode"), "encode", several);
    put(this.lanes.decode.node.querySelector("h2"), unified ? "Workers" : "Decode");
    figure(this.nodes["arrivals-figure"], [amount(window.requests_per_s), "per second"]);
    put(this.nodes["arrivals-note"], `${router.running} running`);
    figure(this.nodes["answers-figure"], [amount(window.output_tokens_per_s), "tokens/s"]);
    put(this.nodes["answers-note"], window.failed ? `${window.failed} failed` : "none failed");
    this.nodes["answers-note"].classList.toggle("bad", window.failed > 0);
    put(this.nodes["crossing-figure"], said(bytes(window.kv_bytes_per_s)));
    this.takeRecords(state);
    this.measure();
  }

  /** The clock shown: the router's, a little behind, and never pulled about by one slow answer. */
  takeRecords({ now_s, requests }) {
    const offset = now_s - performance.now() / 1000;
    this.offset = this.offset === null || Math.abs(offset - this.offset) > 2 ? offset : Math.max(this.offset, offset);
    for (const record of requests) {
      const known = this.dots.get(record.key);
      if (known) known.marks = marksOf(record);
      else if (this.dots.size < MAX_DOTS && !this.isOver(marksOf(record))) this.dots.set(record.key, new Dot(record));
    }
  }

  isOver(marks) {
    return marks.ended !== null && marks.out + TRAVEL_S < this.shown(performance.now());
  }

  shown(at) {
    return at / 1000 + this.offset - BEHIND_S;
  }

  /** Where cards and ends are, and the links between them. */
  measure() {
    const box = this.section.getBoundingClientRect();
    const upright = getComputedStyle(this.section).getPropertyValue("--upright").trim() === "1";
    const place = (node) => {
      const r = node.getBoundingClientRect();
      const x = r.left - box.left, y = r.top - box.top;
      return upright // all links run down one rail at the right, behind the cards
        ? { in: [x + r.width - RAIL, y], out: [x + r.width - RAIL, y + r.height], dock: null }
        : { in: [x, y + r.height / 2], out: [x + r.width, y + r.height / 2], dock: null };
    };
    this.upright = upright;
    this.places = new Map([["arrivals", place(this.nodes.arrivals)], ["answers", place(this.nodes.answers)]]);
    for (const lane of Object.values(this.lanes))
      for (const card of lane.cards.values()) {
        const r = card.dock.getBoundingClientRect();
        if (r.width) this.places.set(card.url, { ...place(card.node), dock: [r.left - box.left, r.top - box.top, r.width, r.height] });
      }
    this.drawLinks();
  }

  drawLinks() {
    const shown = (lane) => [...lane.cards.values()].filter((card) => this.places.has(card.url));
    const firsts = shown(this.lanes.prefill), seconds = shown(this.lanes.decode), alone = shown(this.lanes.alone);
    const ends = (cards, other, before) => cards.map((card) => (before ? [other, card.url, card] : [card.url, other, card]));
    const pairs = [
      ...ends(firsts.length ? firsts : seconds, "arrivals", true),
      ...firsts.flatMap((p) => seconds.map((d) => [p.url, d.url, p.node.dataset.health === "up" ? d : p])),
      ...ends(seconds, "answers", false),
      ...ends(alone, "arrivals", true),
      ...ends(alone, "answers", false),
    ];
    while (this.roads.children.length > pairs.length) this.roads.lastChild.remove();
    while (this.roads.children.length < pairs.length) this.roads.append(svg("path"));
    pairs.forEach(([from, to, card], i) => {
      const line = this.roads.children[i];
      const [a, b, c, d] = curve(this.places.get(from).out, this.places.get(to).in, this.upright);
      const drawn = `M${a.map(round)}C${b.map(round)} ${c.map(round)} ${d.map(round)}`;
      if (line.getAttribute("d") !== drawn) line.setAttribute("d", drawn);
      line.setAttribute("class", card.node.dataset.health === "up" ? "link" : "link off");
    });
  }

  frame(at) {
    requestAnimationFrame((next) => this.frame(next));
    if (this.offset === null || document.hidden) return;
    const now = this.shown(at), docked = new Map();
    for (const [key, dot] of this.dots) {
      if (!dot.move(this, now, docked)) {
        dot.node.remove();
        this.dots.delete(key);
      }
    }
  }
}

/** What a dot is moved by. `crossed`, `out`: when it leaves prefill, and decode, as shown (never at once). */
function marksOf(record) {
  const attempt = answeringOf(record);
  const pd = attempt?.prefill ?? null;
  const ended = record.ended_s;
  const left = [attempt?.prefill_ended_s, record.first_byte_s, ended].filter((v) => v !== null && v !== undefined);
  const came = record.started_s + TRAVEL_S + STAY_S;
  const crossed = pd ? (left.length ? Math.max(Math.min(...left), came) : null) : record.started_s;
  const out = ended === null ? null : Math.max(ended, (crossed ?? came) + TRAVEL_S + STAY_S);
  const bad = record.status >= 400 || record.failure !== "";
  return { started: record.started_s, prefill: pd, decode: attempt?.answering ?? null, crossed, ended, out, bad };
}

class Dot {
  constructor(record) {
    this.marks = marksOf(record);
    this.node = svg("circle", { r: 4 });
    this.at = null;
    this.travels = true;
  }

  /** False when it has left the picture. */
  move(flow, now, docked) {
    const m = this.marks;
    if (m.out !== null && now > m.out + TRAVEL_S) return false;
    const target = this.target(flow, now, docked);
    this.node.setAttribute("class", !target ? "dot hidden" : m.bad && m.ended !== null && now > m.out - STAY_S ? "dot bad" : `dot ${target.tone}`);
    if (!target) return true;
    const layer = target.travels ? flow.below : flow.above;
    if (this.node.parentNode !== layer) layer.append(this.node);
    const [x, y] = target.point;
    if (target.left !== undefined && this.travels) // it comes in at the side where it arrived, on the row's height
      this.at = [Math.min(Math.max(this.at?.[0] ?? x, target.left), target.right), y];
    this.travels = target.travels;
    // What stands glides to its place in the row; what travels keeps to its link.
    this.at = this.at === null || target.travels ? [x, y] : [this.at[0] + (x - this.at[0]) * 0.2, this.at[1] + (y - this.at[1]) * 0.2];
    this.node.setAttribute("cx", round(this.at[0]));
    this.node.setAttribute("cy", round(this.at[1]));
    return true;
  }

  target(flow, now, docked) {
    const m = this.marks, first = m.prefill ?? m.decode;
    if (now < m.started || !first || !flow.places.has(first)) return null;
    if (now < m.started + TRAVEL_S) return this.travel(flow, "arrivals", first, (now - m.started) / TRAVEL_S, m.prefill ? "prefill" : "decode");
    if (m.prefill && (m.crossed === null || now < m.crossed)) return dockOf(flow, first, docked, "prefill");
    if (m.prefill && now < m.crossed + TRAVEL_S) return this.travel(flow, m.prefill, m.decode, (now - m.crossed) / TRAVEL_S, "crossing");
    if (m.out === null || now < m.out) return dockOf(flow, m.decode, docked, "decode");
    return this.travel(flow, m.decode, "answers", (now - m.out) / TRAVEL_S, "decode");
  }

  travel(flow, from, to, share, tone) {
    const start = flow.places.get(from), end = flow.places.get(to);
    if (!start || !end || flow.still.matches) return null;
    const t = share * share * (3 - 2 * share);
    return { point: along(curve(start.out, end.in, flow.upright), t), travels: true, tone };
  }
}

/** A place in the row of dots that stand in a card. */
function dockOf(flow, url, docked, tone) {
  const dock = flow.places.get(url)?.dock;
  if (!dock) return null;
  const [left, top, width, height] = dock, step = 11;
  const index = docked.get(url) ?? 0;
  docked.set(url, index + 1);
  const fits = Math.max(1, Math.floor(width / step));
  return { point: [left + 5 + (index % fits) * step, top + height / 2], left, right: left + width, travels: false, tone };
}

function curve([ax, ay], [bx, by], upright) {
  const bend = upright ? [0, (by - ay) / 2] : [(bx - ax) / 2, 0];
  return [[ax, ay], [ax + bend[0], ay + bend[1]], [bx - bend[0], by - bend[1]], [bx, by]];
}

function along([a, b, c, d], t) {
  const u = 1 - t;
  return [0, 1].map((i) => u * u * u * a[i] + 3 * u * u * t * b[i] + 3 * u * t * t * c[i] + t * t * t * d[i]);
}

const round = (value) => Math.round(value * 10) / 10;

/** The answer is told every new state. */
export function makeFlow(section) {
  const flow = new Flow(section);
  return (state) => flow.update(state);
}
