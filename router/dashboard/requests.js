// The last requests as rows; a click opens one's time line. Owns the rows, and asks for the details of those that are open.

import { el, nameOf, put, said, svg, time } from "/dashboard/show.js";

const KINDS = { "/v1/chat/completions": "chat", "/v1/completions": "completion", "/generate": "generate", "/v1/embeddings": "embedding" };

const MAX_ASKED = 5;

const isBad = (record) => record.status >= 400 || record.failure !== "";

function statusOf(record) {
  if (record.status === 0) return record.first_byte_s === null ? "prefill" : "streaming";
  if (record.status === 499) return "left";
  return isBad(record) && record.status < 400 ? "broken" : String(record.status);
}

/** The attempt that answers, or may yet: of two at a time the one that was not ended for the other. */
export function answeringOf(record) {
  const going = record.attempts.filter((attempt) => attempt.failure === "" && attempt.cancelled_s === null);
  return going.at(-1) ?? record.attempts.at(-1) ?? null;
}

const tryOf = (attempt, i) => (attempt.hedge ? `hedge, try ${i + 1}` : `try ${i + 1}`);

/** Spans of a request, in seconds of the router's clock: {lane, name, from, to, tone}. `to` null: it lasts. */
export function spansOf(record) {
  const spans = [];
  const first = record.attempts[0];
  if (first && first.started_s - record.started_s > 1e-4)
    spans.push({ lane: "router", name: "chosen", from: record.started_s, to: first.started_s, tone: "quiet" });
  const answering = answeringOf(record);
  record.attempts.forEach((attempt, i) => {
    const again = record.attempts.length > 1 ? ` (${tryOf(attempt, i)})` : "";
    const end = attempt.failed_s ?? attempt.cancelled_s ?? record.ended_s;
    const begun = attempt === answering ? record.first_byte_s : null;
    const failed = attempt.failure !== "";
    if (attempt.prefill !== null)
      spans.push({ lane: nameOf(attempt.prefill), name: `prefill and KV transfer${again}`, from: attempt.started_s,
        to: attempt.prefill_ended_s ?? end, tone: failed ? "bad" : "prefill" });
    spans.push({ lane: nameOf(attempt.answering), name: begun === null ? `waiting${again}` : `first token${again}`,
      from: attempt.started_s, to: begun ?? end, tone: failed ? "bad" : "quiet" });
    if (begun !== null && record.num_events > 1)
      spans.push({ lane: nameOf(attempt.answering), name: "answer", from: begun, to: record.last_byte_s ?? end, tone: "decode" });
  });
  return spans;
}

/** The workers' own stages, from POST /traces (what `tandem trace` writes), on the clock of `record`; none if nobody kept them.

Times there are of the Unix epoch; a worker on another machine may have another clock, so its part is moved to where it was
sent to should it begin outside of that. */
function workerSpans(record, told, wall) {
  const sent = new Map(record.attempts.flatMap((a) => [[a.prefill, a], [a.answering, a]]));
  const parts = told.filter((part) => part.process !== "router" && sent.has(part.url));
  parts.sort((a, b) => (b.process === "prefill") - (a.process === "prefill") || a.start_s - b.start_s);
  return parts.flatMap((part) => {
    const { started_s } = sent.get(part.url);
    const begins = part.start_s - wall;
    const shift = begins < started_s || begins > (record.ended_s ?? Infinity) ? started_s - begins : 0;
    return (part.spans ?? []).map((span) => ({
      lane: nameOf(part.url), name: span.name.replaceAll("_", " "), from: span.start_s - wall + shift, to: span.end_s - wall + shift,
      tone: part.process === "prefill" ? "prefill" : "decode", inner: true,
    }));
  });
}

class Row {
  constructor(record, ask) {
    this.workers = [];
    this.asked = 0;
    this.ask = ask;
    this.cells = Object.fromEntries(["when", "id", "kind", "status", "ttft", "total"].map((name) => [name, el("span", name)]));
    this.mini = svg("svg", { class: "mini", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.head = el("button", "row", ...Object.values(this.cells), this.mini);
    this.head.type = "button";
    this.head.setAttribute("aria-expanded", "false");
    this.detail = el("div", "detail");
    this.detail.hidden = true;
    this.node = el("div", "request", this.head, this.detail);
    this.node.dataset.key = record.key;
    this.head.addEventListener("click", () => this.toggle());
    this.drawn = "";
  }

  update(record, state) {
    this.record = record;
    const version = `${record.ended_s}${record.num_events}${record.attempts.length}${record.status}`;
    this.now = state.now_s;
    this.wall = state.wall_s - state.now_s;
    if (version === this.drawn && record.ended_s !== null) return;
    const ended = this.drawn !== "" && record.ended_s !== null;
    this.drawn = version;
    const end = record.ended_s ?? state.now_s;
    const date = new Date((state.wall_s - state.now_s + record.started_s) * 1000);
    put(this.cells.when, date.toTimeString().slice(0, 8));
    put(this.cells.id, record.request_id);
    put(this.cells.kind, KINDS[record.path] ?? record.path);
    put(this.cells.status, statusOf(record));
    put(this.cells.ttft, record.first_byte_s === null ? "" : said(time(record.first_byte_s - record.started_s)));
    put(this.cells.total, said(time(end - record.started_s)));
    this.node.classList.toggle("bad", isBad(record) && record.status !== 499);
    this.node.classList.toggle("live", record.status === 0);
    drawBars(this.mini, spansOf(record), record.started_s, end, { width: 100, height: 8, row: 0 });
    if (this.detail.hidden) return;
    this.show(record);
    if (ended) this.refresh(); // now the workers have told their part
  }

  async toggle() {
    this.detail.hidden = !this.detail.hidden;
    this.head.setAttribute("aria-expanded", String(!this.detail.hidden));
    if (this.detail.hidden) return;
    this.show(this.record);
    await this.refresh();
  }

  /** The record as it is now, should the list have moved on. */
  async refresh() {
    try {
      const answer = await this.ask(`/dashboard/requests/${encodeURIComponent(this.record.key)}`);
      if (answer.ok) this.record = (await answer.json()).record;
      else this.record.ended_s ??= this.now; // forgotten: it is asked for no more
      this.workers = await this.askWorkers();
      this.show(this.record);
    } catch (error) {
      // The next state will say that the router is gone.
    }
  }

  /** The list has moved on while it ran, or its workers, busy perhaps, have not told their part: then it is asked again, a few times. */
  isIncomplete(shown) {
    return this.record.ended_s === null ? !shown.has(this.record.key) : !this.workers.length && this.asked < MAX_ASKED;
  }

  async askWorkers() {
    this.asked += 1;
    const answer = await this.ask("/traces", { ids: [this.record.request_id] });
    return answer.ok ? workerSpans(this.record, (await answer.json()).records ?? [], this.wall) : [];
  }

  show(record) {
    const end = record.ended_s ?? this.now;
    const facts = [
      ["request id", record.request_id],
      ["prompt", `about ${record.prompt_tokens} tokens`],
      ["first token", record.first_byte_s === null ? "not yet" : said(time(record.first_byte_s - record.started_s))],
      ...(record.num_events > 1 && record.last_byte_s !== null
        ? [["answer", `${record.num_events} events, ${said(time((record.last_byte_s - record.first_byte_s) / (record.num_events - 1)))} apart`]] : []),
      ...record.attempts.flatMap((a, i) => (a.failure ? [[`${tryOf(a, i)} failed`, a.failure]] : [])),
      ...record.attempts.flatMap((a, i) => (a.cancelled_s !== null ? [[`${tryOf(a, i)} ended`, "the other attempt answered first"]] : [])),
      ...(record.failure && !record.attempts.some((a) => a.failure === record.failure) ? [["failed", record.failure]] : []),
    ];
    this.detail.replaceChildren(
      timeLine([...spansOf(record), ...this.workers], record.started_s, Math.max(end, record.started_s + 1e-6)),
      el("dl", "facts", ...facts.flatMap(([name, value]) => [el("dt", "", name), el("dd", "", value)])),
    );
  }
}

function drawBars(drawing, spans, start, end, { width, height }) {
  const scale = width / Math.max(end - start, 1e-6);
  drawing.replaceChildren(...spans.filter((s) => s.tone !== "quiet").map((span) => svg("rect", {
    class: `span ${span.tone}`, x: (span.from - start) * scale, y: 1, height: height - 2, rx: 1,
    width: Math.max(1, ((span.to ?? end) - span.from) * scale),
  })));
}

/** Spans of one name at one place share a line: a long prompt has many chunks. */
function linesOf(spans) {
  const lines = new Map();
  for (const span of spans) {
    const key = `${span.lane} ${span.name}`;
    lines.set(key, [...(lines.get(key) ?? []), span]);
  }
  return [...lines.values()];
}

/** One line a stage: its name and length, and bars on a common scale. */
function timeLine(spans, start, end) {
  const whole = end - start;
  const lines = linesOf(spans).map((line) => {
    const bars = line.map((span) => {
      const bar = el("span", `span ${span.tone}`);
      const left = Math.min(1, Math.max(0, (span.from - start) / whole));
      bar.style.left = `${left * 100}%`;
      bar.style.width = `${Math.min(1 - left, Math.max(0.004, ((span.to ?? end) - span.from) / whole)) * 100}%`;
      return bar;
    });
    const long = line.reduce((sum, span) => sum + (span.to ?? end) - span.from, 0);
    const name = line.length > 1 ? `${line[0].name} × ${line.length}` : line[0].name;
    return el("div", line[0].inner ? "line inner" : "line", el("span", "what", name), el("span", "where", line[0].lane),
      el("span", "bars", ...bars), el("span", "long", said(time(long))));
  });
  const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => el("span", "", said(time(share * whole))));
  return el("div", "timeline", ...lines, el("div", "line axis", el("span", "what"), el("span", "where"), el("span", "marks", ...marks), el("span", "long")));
}

/** `ask(path, body)` fetches; the answer is told every new state. While a row is open the list stands still, and `held` says so. */
export function makeRequests(box, held, ask) {
  const rows = new Map();
  const empty = el("p", "note", "No request has come yet.");
  return (state) => {
    const shown = new Map(state.requests.map((record) => [record.key, record]));
    const open = [...rows.values()].filter((row) => !row.detail.hidden);
    held.hidden = !open.length;
    for (const row of open) if (row.isIncomplete(shown)) row.refresh();
    for (const [key, row] of rows) if (!open.length && !shown.has(key)) { row.node.remove(); rows.delete(key); }
    for (const [key, record] of shown) {
      if (open.length && !rows.has(key)) continue;
      if (!rows.has(key)) rows.set(key, new Row(record, ask));
      rows.get(key).update(record, state);
    }
    const order = [...rows.values()].sort((a, b) => b.record.started_s - a.record.started_s || (a.record.key < b.record.key ? 1 : -1));
    order.forEach((row, i) => { if (box.children[i] !== row.node) box.insertBefore(row.node, box.children[i] ?? null); });
    if (!order.length) box.replaceChildren(empty);
    else empty.remove();
  };
}
