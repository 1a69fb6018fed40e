// The tiles: a figure, a note, and two minutes as curves over a time axis. Owns their nodes.

import { amount, bytes, el, figure, percent, put, said, svg, time } from "/web/show.js";

const WIDTH = 240, HEIGHT = 56;

const rate = (value, unit) => [amount(value), unit];

/** What is in each tile: its name, the figure, the note, curves (the last one stands in front), how to say a point, the highest value if fixed. */
const TILES = [
  {
    id: "requests", name: "Requests", tone: "decode",
    figure: (w) => rate(w.requests_per_s, "per second"),
    note: (w, { router }) => `${w.ended} ended in the last minute, ${router.running} running`,
    curves: (s) => [s.requests], point: (v) => `${amount(v)} a second`,
  },
  {
    id: "prompts", name: "Tokens in", tone: "prefill",
    figure: (w) => rate(w.prompt_tokens_per_s, "tokens/s"),
    note: () => "of prompts",
    curves: (s) => [s.prompt_tokens], point: (v) => said(rate(v, "tokens/s")),
  },
  {
    id: "cache", name: "Cache hit rate", tone: "prefill",
    figure: (w) => percent(w.cache_hit_rate),
    note: () => "of prompt tokens",
    curves: (s) => [s.cache_hit_rate], point: (v) => said(percent(v)), top: 1,
  },
  {
    id: "throughput", name: "Tokens out", tone: "decode",
    figure: (w) => rate(w.output_tokens_per_s, "tokens/s"),
    note: (w, { workers }) => draftNote(workers),
    curves: (s) => [s.output_tokens], point: (v) => said(rate(v, "tokens/s")),
  },
  {
    id: "ttft", name: "Time to first token", tone: "prefill",
    figure: (w) => time(w.ttft.p50),
    note: (w) => quantiles(w.ttft),
    curves: (s) => [s.ttft_p99, s.ttft_p50], point: (v) => said(time(v)),
  },
  {
    id: "itl", name: "Time between tokens", tone: "decode",
    figure: (w) => time(w.gap.p50),
    note: (w) => quantiles(w.gap),
    curves: (s) => [s.gap_p99, s.gap_p50], point: (v) => said(time(v)),
  },
  {
    id: "kv", name: "KV transfer", tone: "prefill",
    figure: (w) => bytes(w.kv_bytes_per_s),
    note: (w, { workers }) => transferNote(workers),
    curves: (s) => [s.kv_bytes], point: (v) => said(bytes(v)),
  },
  {
    id: "failures", name: "Failures", tone: "bad",
    figure: (w) => [String(w.failed), `of ${w.ended}`],
    note: (w) => failureNote(w),
    curves: (s) => [s.failed], point: (v) => `${v} failed`,
  },
];

const quantiles = ({ p90, p99 }) => (p99 === null ? "none in the last minute" : `median; p90 ${said(time(p90))}, p99 ${said(time(p99))}`);

function transferNote(workers) {
  const senders = workers.map((w) => w.report).filter((r) => r && r.transfer_gb_s > 0);
  if (!senders.length) return "no transfer yet";
  const mean = (name) => senders.reduce((sum, r) => sum + r[name], 0) / senders.length;
  return `each at ${said(bytes(mean("transfer_gb_s") * 1e9))}, in ${said(time(mean("transfer_ms") / 1e3))}`;
}

/** Of workers whose drafts are accepted. */
function draftNote(workers) {
  const lengths = workers.map((w) => w.report?.accept_length ?? 0).filter((length) => length > 1);
  if (!lengths.length) return "of answers";
  return `of answers, ${(lengths.reduce((sum, one) => sum + one, 0) / lengths.length).toFixed(2)} tokens a step and request`;
}

function failureNote(window) {
  const parts = Object.entries(window.failures).sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
  const retried = window.retried ? [`${window.retried} tried again`] : [];
  return [...parts.slice(0, 2).map(([what, count]) => `${count} × ${what}`), ...retried].join(", ") || "none in the last minute";
}

class Tile {
  constructor(spec) {
    this.spec = spec;
    this.figure = el("p", "figure");
    this.note = el("p", "note");
    this.back = svg("path", { class: "curve back" });
    this.area = svg("path", { class: "area" });
    this.front = svg("path", { class: "curve" });
    this.mark = svg("line", { class: "mark", y1: 0, y2: HEIGHT });
    this.drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.area, this.back, this.front, this.mark);
    this.peak = el("span", "peak");
    this.since = el("span");
    const axis = el("p", "times", this.since, el("span", "", "1 min"), el("span", "", "now"));
    this.node = el("article", `tile ${spec.tone}`, el("h3", "", spec.name), this.figure, this.note, el("div", "chart", this.peak, this.drawing), axis);
    this.node.id = `tile-${spec.id}`;
    this.at = null;
    this.drawing.addEventListener("pointermove", (event) => {
      this.at = event.offsetX / this.drawing.clientWidth;
      this.draw();
    });
    this.drawing.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
  }

  update(state) {
    this.state = state;
    this.draw();
  }

  draw() {
    const { window, series } = this.state;
    const curves = this.spec.curves(series);
    const peak = Math.max(1e-9, ...curves.flat().filter((v) => v !== null)), top = (this.spec.top ?? peak) * 1.08;
    const last = curves.at(-1), calm = last.every((v) => !v);
    this.node.classList.toggle("calm", calm);
    put(this.peak, calm ? "" : `highest ${this.spec.point(peak)}`);
    put(this.since, `${last.length / 60} min ago`);
    figure(this.figure, this.spec.figure(window));
    put(this.note, this.at === null ? this.spec.note(window, this.state) : this.hint(last));
    this.front.setAttribute("d", path(last, top));
    this.area.setAttribute("d", path(last, top, true));
    this.back.setAttribute("d", curves.length > 1 ? path(curves[0], top) : "");
    const x = this.at === null ? -9 : this.at * WIDTH;
    this.mark.setAttribute("x1", x);
    this.mark.setAttribute("x2", x);
  }

  hint(values) {
    const index = Math.min(values.length - 1, Math.max(0, Math.round(this.at * (values.length - 1))));
    const value = values[index];
    return `${values.length - index} s ago: ${value === null ? "nothing" : this.spec.point(value)}`;
  }
}

/** A curve through the values there are; seconds without one are bridged when few, and break it when many. */
function path(values, top, filled = false) {
  const runs = [];
  let before = -99;
  values.forEach((value, i) => {
    if (value === null) return;
    if (i - before > 5) runs.push([]);
    before = i;
    runs.at(-1).push([(i / (values.length - 1)) * WIDTH, HEIGHT - 1 - (value / top) * (HEIGHT - 4)]);
  });
  return runs.map((run) => piece(run, filled)).join("");
}

function piece(points, filled) {
  if (points.length === 1) points = [[points[0][0] - 1, points[0][1]], points[0]];
  const line = points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  return filled ? `${line}L${points.at(-1)[0].toFixed(1)} ${HEIGHT}L${points[0][0].toFixed(1)} ${HEIGHT}Z` : line;
}

/** Makes the tiles once; the answer is called with every new state. */
export function makeTiles(section) {
  const tiles = TILES.map((spec) => new Tile(spec));
  section.append(...tiles.map((tile) => tile.node));
  return (state) => tiles.forEach((tile) => tile.update(state));
}
