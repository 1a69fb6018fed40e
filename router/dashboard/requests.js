// The last requests as rows; a click opens one's time line. Owns the rows, and asks for the details of those that are open.

import { el, put, said, svg, time } from "/web/show.js";
import { drawBars, spansOf, timeLine, workerSpans } from "/web/timeline.js";

const KINDS = { "/v1/chat/completions": "chat", "/v1/completions": "completion", "/generate": "generate", "/v1/embeddings": "embedding" };

const MAX_ASKED = 5;

const isBad = (record) => record.status >= 400 || record.failure !== "";

function statusOf(record) {
  if (record.status === 0) return record.first_byte_s === null ? "prefill" : "streaming";
  if (record.status === 499) return "left";
  return isBad(record) && record.status < 400 ? "broken" : String(record.status);
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
      ...record.attempts.flatMap((a, i) => (a.failure ? [[`try ${i + 1} failed`, a.failure]] : [])),
      ...(record.failure && !record.attempts.some((a) => a.failure === record.failure) ? [["failed", record.failure]] : []),
    ];
    this.detail.replaceChildren(
      timeLine([...spansOf(record), ...this.workers], record.started_s, Math.max(end, record.started_s + 1e-6)),
      el("dl", "facts", ...facts.flatMap(([name, value]) => [el("dt", "", name), el("dd", "", value)])),
    );
  }
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
