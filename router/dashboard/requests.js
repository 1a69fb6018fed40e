// The last requests as rows; a click opens one's time line. Owns the rows, and asks for the details of those that are open.

import { el, nameOf, put, said, svg, time } from "/web/show.js";
import { answeringOf, drawBars, spansOf, timeLine, workerSpans } from "/web/timeline.js";
import { term } from "/web/tip.js";

const KINDS = {
  "/v1/chat/completions": "chat", "/v1/completions": "completion", "/v1/messages": "messages",
  "/generate": "generate", "/v1/embeddings": "embedding",
};

const MAX_ASKED = 5;

const isBad = (record) => record.status >= 400 || record.failure !== "";

function statusOf(record) {
  if (record.status === 0) return record.first_byte_s === null ? "prefill" : "streaming";
  if (record.status === 499) return "left";
  return isBad(record) && record.status < 400 ? "broken" : String(record.status);
}

const CELLS = { // class -> [head, what it means]
  when: ["Time", "When the request came."],
  id: ["Request", "Its id, the X-Request-Id of its answer. A click shows its time line."],
  kind: ["API", ""],
  status: ["Status", "The HTTP status of its answer, or its stage until then. Left: its client went away. Broken: its answer broke off."],
  ttft: ["First token", "From the request until the first token."],
  total: ["Total", "From the request until the end of its answer."],
  tokens: ["In", "Tokens of the prompt, as the router estimates them. An open row has the worker's count."],
  out: ["Out", "Tokens of a streamed answer, counted by its events. An open row has the worker's count."],
  workers: ["Workers", "Prefill worker → decode worker."],
};

/** An element with the role of a table's part: as a grid, a table would lose its own. */
function part(role, className, ...children) {
  const made = el("div", className, ...children);
  made.role = role;
  return made;
}

function heads() {
  const cells = Object.entries(CELLS).map(([name, [head, meaning]]) => part("columnheader", name, term(head, meaning)));
  return part("rowgroup", "", part("row", "heads", ...cells, part("columnheader", "", "Time line")));
}

const count = (value) => value.toLocaleString("en");

/** {input, output, cached}: tokens, as the workers counted them; empty where they kept nothing. `output`: of the worker that answered. */
function usageOf(record, parts) {
  const usage = parts.filter((one) => one.process !== "router").map((one) => [one.url, one.attributes ?? {}]);
  const all = (name) => usage.map(([, attributes]) => attributes[`gen_ai.usage.${name}`] ?? 0);
  if (!usage.length) return {};
  const answering = answeringOf(record)?.answering;
  const output = usage.filter(([url]) => url === answering).reduce((sum, [, attributes]) => sum + (attributes["gen_ai.usage.output_tokens"] ?? 0), 0);
  return { input: Math.max(...all("input_tokens")), output, cached: Math.max(...all("cache_read.input_tokens")) };
}

class Row {
  constructor(record, ask) {
    this.workers = [];
    this.exact = {};
    this.asked = 0;
    this.ask = ask;
    this.cells = Object.fromEntries(Object.keys(CELLS).map((name) => [name, part("cell", name)]));
    this.open = el("button", "open", record.request_id);
    this.open.type = "button";
    this.open.setAttribute("aria-expanded", "false");
    this.cells.id.append(this.open);
    this.mini = svg("svg", { class: "mini", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.head = part("row", "row", ...Object.values(this.cells), part("cell", "", this.mini));
    this.detail = part("cell", "detail");
    this.below = part("row", "", this.detail);
    this.below.hidden = this.detail.hidden = true;
    this.node = part("rowgroup", "request", this.head, this.below);
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
    put(this.cells.kind, KINDS[record.path] ?? record.path);
    put(this.cells.status, statusOf(record));
    put(this.cells.ttft, record.first_byte_s === null ? "" : said(time(record.first_byte_s - record.started_s)));
    put(this.cells.total, said(time(end - record.started_s)));
    this.showWorkers();
    this.showTokens();
    this.node.classList.toggle("bad", isBad(record) && record.status !== 499);
    this.node.classList.toggle("live", record.status === 0);
    drawBars(this.mini, spansOf(record), record.started_s, end, { width: 100, height: 8, row: 0 });
    if (this.detail.hidden) return;
    this.show(record);
    if (ended) this.refresh(); // now the workers have told their part
  }

  showWorkers() {
    const attempt = answeringOf(this.record), cell = this.cells.workers;
    const names = attempt === null ? [] : [attempt.prefill, attempt.answering].filter((url) => url !== null).map(nameOf);
    if (cell.title === names.join(" → ")) return;
    cell.title = names.join(" → ");
    cell.replaceChildren(...names.flatMap((name, i) => [...(i ? [" → "] : []), el("i", names.length > 1 && !i ? "prefill" : "decode"), name]));
  }

  showTokens() {
    const { input, output } = this.exact, { prompt_tokens: estimate, num_events: events } = this.record;
    put(this.cells.tokens, input ? count(input) : estimate ? `~${count(estimate)}` : "–");
    put(this.cells.out, output ? count(output) : events > 1 ? `~${count(events)}` : "–");
  }

  async toggle() {
    this.below.hidden = this.detail.hidden = !this.detail.hidden;
    this.open.setAttribute("aria-expanded", String(!this.detail.hidden));
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
    const parts = answer.ok ? (await answer.json()).records ?? [] : [];
    this.exact = usageOf(this.record, parts);
    this.showTokens();
    return workerSpans(this.record, parts, this.wall);
  }

  show(record) {
    const end = record.ended_s ?? this.now;
    const { input, output, cached } = this.exact;
    const apart = record.num_events > 1 && record.last_byte_s !== null ? (record.last_byte_s - record.first_byte_s) / (record.num_events - 1) : null;
    const answer = [...(output ? [`${count(output)} tokens`] : []), ...(apart === null ? [] : [`${count(record.num_events)} events, ${said(time(apart))} apart`])];
    const facts = [
      ["request id", record.request_id],
      ...(record.model ? [["model", record.model]] : []),
      ["workers", this.cells.workers.title || "none yet"],
      ["prompt", input ? `${count(input)} tokens, ${count(cached)} of them from the prefix cache` : `about ${count(record.prompt_tokens)} tokens`],
      ["first token", record.first_byte_s === null ? "not yet" : said(time(record.first_byte_s - record.started_s))],
      ...(answer.length ? [["answer", answer.join(", ")]] : []),
      ...record.attempts.flatMap((a, i) => (a.failure ? [[`try ${i + 1} failed`, a.failure]] : [])),
      ...(record.failure && !record.attempts.some((a) => a.failure === record.failure) ? [["failed", record.failure]] : []),
    ];
    this.detail.replaceChildren(
      timeLine([...spansOf(record), ...this.workers], record.started_s, Math.max(end, record.started_s + 1e-6)),
      el("dl", "facts", ...facts.flatMap(([name, value]) => [el("dt", "", name), el("dd", "", value)])),
    );
  }
}

/** `ask(path, body)` fetches; the answer is called with every new state. While a row is open the list stands still, and `held` says so. */
export function makeRequests(box, held, ask) {
  const rows = new Map();
  const empty = el("p", "note", "No request has come yet.");
  const table = part("table", "", heads());
  table.ariaLabel = "Last requests";
  table.hidden = true;
  box.append(empty, table);
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
    order.forEach((row, i) => { if (table.children[i + 1] !== row.node) table.insertBefore(row.node, table.children[i + 1] ?? null); });
    table.hidden = !order.length;
    empty.hidden = !table.hidden;
  };
}
