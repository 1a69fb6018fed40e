// What the names of stages mean. The names are those of SGLang's queues and of the workers' time lines.

const TAKEN_OUT = "Taken out of the batch because KV memory ran out. It waits to go on.";
const BATCH = "Waiting for a place in a batch.";

/** role -> {queue: meaning}, in the order in which requests pass; `retracted` shows only where there are some. */
export const QUEUES = {
  prefill: {
    bootstrap: "Waiting until the decode worker has reserved memory and sent its page numbers.",
    waiting: BATCH,
    running: "The prompt is being computed.",
    inflight: "The prompt is computed; its KV cache is being sent to the decode worker.",
    retracted: TAKEN_OUT,
  },
  decode: {
    prealloc: "Waiting for free KV memory on the decode worker.",
    transfer: "Memory is reserved; the KV cache is arriving from the prefill worker.",
    running: "Tokens are being generated.",
    retracted: TAKEN_OUT,
  },
  unified: { waiting: BATCH, running: "The prompt is being computed, or tokens are being generated.", retracted: TAKEN_OUT },
  encode: { waiting: BATCH, running: "Images are being encoded.", retracted: TAKEN_OUT },
};

const SPANS = {
  routing: "The router reads the request and chooses its workers.",
  "prefill and KV transfer": "From sending the request to the prefill worker until it has delivered the KV cache.",
  waiting: "The request was sent; nothing of the answer has come yet.",
  "first token": "From sending the request until the first token of the answer.",
  answer: "From the first token of the answer to the last.",
  queue: BATCH,
  prefill: "The prompt is computed.",
  chunk: "Part of the prompt, computed in one step.",
  transfer: "From the end of the prompt's computation until all KV cache has arrived at the decode worker.",
  "transfer queue": "From the offer of memory until all KV cache has arrived.",
  decode: "Tokens are generated.",
};
const BOOTSTRAPS = {
  prefill: QUEUES.prefill.bootstrap,
  decode: "The decode worker meets the prefill worker and reserves memory for the KV cache.",
};

/** The meaning of a span of a time line; "" where there is none. `tone`: of the worker whose span it is. */
export function meaningOf({ name, tone }) {
  const plain = name.replace(/ \(try \d+\)$/, "");
  return (plain === "bootstrap" ? BOOTSTRAPS[tone] : SPANS[plain]) ?? "";
}
