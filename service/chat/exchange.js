// One question and its answer: its text, its times, where it went; and the elements that show them.

import { isRouter, newId, streamChat, traceOf } from "/chat/api.js";
import { copyText, Rendered } from "/chat/markdown.js";
import { contentOf, picture } from "/chat/pictures.js";
import { el, nameOf, put, said, time } from "/web/show.js";
import { answeringOf, spansOf, timeLine, workerSpans } from "/web/timeline.js";

const LEAST_MS = 20, ENDS = ["done", "stopped", "failed"];
const KEPT = ["id", "text", "thoughts", "state", "figures", "lost", "trace"], TEXTS = ["question", "text", "thoughts", "figures"];

function small(text, act) {
  const button = el("button", "small", text);
  button.type = "button";
  button.addEventListener("click", () => act(button));
  return button;
}

/** `state`: "waiting", "streaming", "done", "stopped" or "failed". */
export class Exchange {
  /** `onEdit(exchange)`, `onAgain(exchange)`: the reader wants that. */
  constructor(question, pictures, { onEdit, onAgain }) {
    Object.assign(this, { question, pictures, text: "", thoughts: "", state: "waiting", figures: "", lost: 0, failure: null });
    this.draw(onEdit, onAgain);
  }

  /** The exchange that `kept()` gave. Throws where it is none. */
  static from(kept, handlers) {
    if (!TEXTS.every((name) => typeof kept[name] === "string") || !ENDS.includes(kept.state)) throw new TypeError("not an exchange");
    const exchange = new Exchange(kept.question, kept.pictures.map(({ name, url }) => ({ name: String(name), url: String(url) })), handlers);
    for (const name of KEPT) exchange[name] = kept[name];
    exchange.failure = kept.failure ? { message: kept.failure } : null;
    exchange.show();
    exchange.showWorkers();
    return exchange;
  }

  /** Itself in plain values. An answer that still runs ends with its page. */
  kept() {
    const values = Object.fromEntries([...KEPT, "question", "pictures"].map((name) => [name, this[name]]));
    const end = this.isRunning ? { state: "stopped", figures: "stopped when the page was left" } : {};
    return { ...values, failure: this.failure?.message ?? "", ...end };
  }

  draw(onEdit, onAgain) {
    this.said = el("div", "said");
    this.rendered = new Rendered(this.said);
    this.wait = el("span", "wait");
    this.thinking = el("details", "thoughts", el("summary", "", "Thoughts"), el("p"));
    this.error = el("p", "error");
    this.measures = el("span", "figures");
    this.crossed = el("button", "small crossed");
    this.detail = el("div", "detail");
    this.again = small("Again", () => onAgain(this));
    this.again.classList.add("again");
    this.actions = [small("Copy", (button) => copyText(this.text, button)), this.again];
    this.meta = el("div", "meta", this.measures, this.crossed, ...this.actions);
    this.answer = el("section", "answer", el("h2", "unseen", "Answer"), this.thinking, this.said, this.wait, this.error, this.meta, this.detail);
    this.loss = el("p", "note");
    const shown = el("div", "pictures", ...this.pictures.map(picture)), asked = el("div", "said", this.question);
    asked.hidden = this.question === "";
    const question = el("section", "question", el("h2", "unseen", "You"), shown, this.loss, asked, small("Edit", () => onEdit(this)));
    this.node = el("li", "exchange", question, this.answer);
    this.crossed.type = "button";
    this.crossed.setAttribute("aria-expanded", "false");
    this.crossed.addEventListener("click", () => this.toggle());
    this.show();
  }

  get isRunning() {
    return this.state === "waiting" || this.state === "streaming";
  }

  /** What the model reads of it: nothing, where no answer came. */
  messages(withPictures) {
    return this.text === "" ? [] : [this.asked(withPictures), { role: "assistant", content: this.text }];
  }

  asked(withPictures) {
    return { role: "user", content: contentOf(this.question, withPictures ? this.pictures : []) };
  }

  /** Ask for the answer, and draw it as it comes. `body`: with the messages up to the question. Throws nothing; `failure` keeps the error. */
  async run(body) {
    Object.assign(this, { text: "", thoughts: "", state: "waiting", failure: null, usage: null, events: 0, firstAt: null, lastAt: null, trace: null, reason: "" });
    this.id = newId();
    this.control = new AbortController();
    this.sentAt = performance.now();
    this.detail.replaceChildren();
    this.show();
    try {
      for await (const event of streamChat(body, { id: this.id, signal: this.control.signal })) this.take(event);
      this.state = "done";
    } catch (error) {
      this.state = error.name === "AbortError" ? "stopped" : "failed";
      if (this.state === "failed") this.failure = error;
    }
    this.figures = this.measured();
    this.show();
  }

  /** The server takes the request back from its workers as soon as the connection closes. */
  stop() {
    this.control?.abort();
  }

  take(event) {
    if (event.usage) this.usage = event.usage;
    this.reason = event.choices?.[0]?.finish_reason ?? this.reason;
    const delta = event.choices?.[0]?.delta ?? {};
    if (!delta.content && !delta.reasoning_content) return;
    this.text += delta.content ?? "";
    this.thoughts += delta.reasoning_content ?? "";
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    this.events += 1;
    this.state = "streaming";
    this.drawing ??= requestAnimationFrame(() => this.show());
  }

  show() {
    cancelAnimationFrame(this.drawing);
    this.drawing = null;
    this.answer.setAttribute("aria-busy", String(this.isRunning));
    this.answer.classList.toggle("failed", this.state === "failed");
    this.loss.hidden = !this.lost;
    put(this.loss, `${this.lost === 1 ? "A picture was" : `${this.lost} pictures were`} too large to keep.`);
    this.rendered.update(this.text);
    this.wait.hidden = this.state !== "waiting";
    this.thinking.hidden = this.thoughts === "";
    put(this.thinking.lastChild, this.thoughts);
    this.error.hidden = !this.failure;
    put(this.error, this.failure?.message ?? "");
    put(this.measures, this.isRunning ? "" : this.figures);
    for (const button of this.actions) button.hidden = this.isRunning;
    this.actions[0].hidden ||= this.text === "";
    put(this.again, this.state === "failed" ? "Try again" : "Again");
    if (!this.trace) this.crossed.hidden = this.detail.hidden = true;
    this.node.dispatchEvent(new Event("grown", { bubbles: true }));
  }

  /** "first token 84 ms · 41.2 tokens/s · 128 tokens" */
  measured() {
    const tokens = this.usage?.completion_tokens ?? this.events;
    const words = this.state === "stopped" ? ["stopped"] : [];
    if (this.firstAt !== null) words.push(`first token ${said(time((this.firstAt - this.sentAt) / 1000))}`);
    const long = this.lastAt - this.firstAt; // of an answer that came in one piece there is no rate
    if (tokens > 1 && long > LEAST_MS) words.push(`${(((tokens - 1) * 1000) / long).toFixed(1)} tokens/s`);
    const cut = this.reason === "length" ? ", cut at the limit" : "";
    if (tokens > 0) words.push(`${tokens} token${tokens === 1 ? "" : "s"}${cut}`);
    return words.join(" · ");
  }

  /** The two workers, if the router knows them. */
  async findWorkers() {
    const id = this.id;
    if (!(await isRouter())) return;
    try {
      const trace = await traceOf(id);
      if (id === this.id) this.trace = trace;
    } catch {
      return; // the answer is there all the same
    }
    this.showWorkers();
  }

  showWorkers() {
    const attempt = this.trace ? answeringOf(this.trace.record) : null;
    if (attempt === null) return;
    const prefill = attempt.prefill === null ? [] : [el("i", "prefill"), nameOf(attempt.prefill), " → "];
    this.crossed.replaceChildren(el("span", "unseen", "Time line: "), ...prefill, el("i"), nameOf(attempt.answering));
    this.crossed.hidden = false;
  }

  async toggle() {
    this.detail.hidden = !this.detail.hidden;
    this.crossed.setAttribute("aria-expanded", String(!this.detail.hidden));
    if (this.detail.hidden) return;
    this.showTimeLine();
    await this.findWorkers(); // by now the workers have reported their part
    this.showTimeLine();
  }

  showTimeLine() {
    const { record, workers, now_s: now, wall_s: wall } = this.trace;
    const end = Math.max(record.ended_s ?? now, record.started_s + 1e-6);
    const link = el("a", "", "the dashboard");
    link.href = "/dashboard";
    this.detail.replaceChildren(timeLine([...spansOf(record), ...workerSpans(record, workers, wall - now)], record.started_s, end),
      el("p", "note", `Request ${record.request_id}, about ${record.prompt_tokens} prompt tokens. All requests: `, link));
  }
}
