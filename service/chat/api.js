// The server's API as this page uses it: models, a streamed answer, the trace of a request.

import { keyHeaders } from "/web/key.js";

/** What the server refused, or that it could not be reached (status 0). */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  get wantsKey() {
    return this.status === 401;
  }
}

/** An unguessable id: it names the request to its trace. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function send(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { ...options.headers, ...keyHeaders() }, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. It may be starting, or gone.");
  }
  if (answer.ok) return answer;
  throw new ApiError(answer.status, await messageOf(answer));
}

async function messageOf(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `HTTP ${answer.status} ${text.slice(0, 300)}`;
  }
}

/** The cards of models, and of adapters with the name of their model as `parent`. */
export async function listModels() {
  return (await (await send("/v1/models")).json()).data ?? [];
}

let pages = null; // path -> what is there

/** Whether this page comes from a router, which has a dashboard and time lines; a worker that serves alone has neither. */
export async function isRouter() {
  try {
    pages ??= (await (await send("/")).json()).links;
  } catch {
    return true; // what cannot be read says so itself
  }
  return "/dashboard" in pages;
}

/** {record, workers, now_s, wall_s}: see GET /traces/ID of the router. */
export async function traceOf(id) {
  return (await send(`/traces/${encodeURIComponent(id)}`)).json();
}

/** The events of a streamed answer, as decoded objects. `ApiError` for one that is refused or breaks off. */
export async function* streamChat(body, { id, signal }) {
  const headers = { "Content-Type": "application/json", "X-Request-Id": id };
  const sent = JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } });
  const answer = await send("/v1/chat/completions", { method: "POST", body: sent, headers, signal });
  for await (const data of eventsOf(answer.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(answer.status, event.error.message);
    yield event;
  }
  throw new ApiError(answer.status, "The answer broke off.");
}

/** The data of server-sent events. */
async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await readFrom(reader);
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

async function readFrom(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection to the server broke.");
  }
}
