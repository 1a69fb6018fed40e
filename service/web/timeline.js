// The time line of a request: its spans, from the router's record and its workers' own, and the elements that show them.

import { el, nameOf, said, svg, time } from "/web/show.js";
import { meaningOf } from "/web/stages.js";
import { term } from "/web/tip.js";

/** The attempt that answers, or may yet. */
export function answeringOf(record) {
  const going = record.attempts.filter((attempt) => attempt.failure === "");
  return going.at(-1) ?? record.attempts.at(-1) ?? null;
}

/** Spans of a request, in seconds of the router's clock: {lane, name, from, to, tone}. `to` null: it lasts. */
export function spansOf(record) {
  const spans = [];
  const first = record.attempts[0];
  if (first && first.started_s - record.started_s > 1e-4)
    spans.push({ lane: "router", name: "routing", from: record.started_s, to: first.started_s, tone: "quiet" });
  const answering = answeringOf(record);
  record.attempts.forEach((attempt, i) => {
    const again = record.attempts.length > 1 ? ` (try ${i + 1})` : "";
    const end = attempt.failed_s ?? record.ended_s;
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

/** The workers' own stages, from POST /traces (what `tandem trace` writes), on the clock of `record`; none where no worker kept them.

Times there are of the Unix epoch; a worker on another machine may have another clock, so its part is moved to where it was
sent to should it begin outside of that. */
export function workerSpans(record, told, wall) {
  const sent = new Map(record.attempts.flatMap((a) => [[a.prefill, a], [a.answering, a]]));
  const parts = told.filter((part) => part.process !== "router" && sent.has(part.url));
  parts.sort((a, b) => (b.process === "prefill") - (a.process === "prefill") || a.start_s - b.start_s);
  return parts.flatMap((part) => {
    const { started_s } = sent.get(part.url);
    const begins = part.start_s - wall;
    const shift = begins < started_s || begins > (record.ended_s ?? Infinity) ? started_s - begins : 0;
    const rank = part.attributes?.["tandem.dp_rank"];
    const lane = rank === undefined ? nameOf(part.url) : `${nameOf(part.url)} DP ${rank}`;
    return (part.spans ?? []).map((span) => ({
      lane, name: span.name.replaceAll("_", " "), from: span.start_s - wall + shift, to: span.end_s - wall + shift,
      tone: part.process === "prefill" ? "prefill" : "decode", inner: true,
    }));
  });
}

/** The spans as bars in a small SVG drawing. */
export function drawBars(drawing, spans, start, end, { width, height }) {
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
export function timeLine(spans, start, end) {
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
    const times = line.length > 1 ? [` × ${line.length}`] : [], name = term(line[0].name, meaningOf(line[0]));
    return el("div", line[0].inner ? "line inner" : "line", el("span", "what", name, ...times), el("span", "where", line[0].lane),
      el("span", "bars", ...bars), el("span", "long", said(time(long))));
  });
  const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => el("span", "", said(time(share * whole))));
  return el("div", "timeline", ...lines, el("div", "line axis", el("span", "what"), el("span", "where"), el("span", "marks", ...marks), el("span", "long")));
}
