"""What the processes of one worker say to each other: tagged msgspec structs in msgpack, closed unions, nothing else.

    frontend (HTTP, tokens <-> text)  --ToScheduler-->  scheduler
    scheduler                         --ToFrontend-->   frontend

Transport: ZMQ PUSH/PULL over ipc:// sockets inside a 0700 directory; one struct a message. The receiver binds,
sender connects. The tokens of a step are sent as one message, so per-token cost is shared.
"""

import msgspec

from engine.sampling_params import SamplingParams

MAX_ASKED_TOKEN_IDS = 128  # of LogprobOptions.token_ids: as many as a metadata row holds
FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # SGLang's habit: this host means "fake transfer for this request"


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Bootstrap(msgspec.Struct, frozen=True, array_like=True):
    """Where a disaggregated request meets its other half. `host` and `port` name the bootstrap server."""

    host: str
    port: int
    room: int


class LogprobOptions(msgspec.Struct, frozen=True, array_like=True):
    """Which logprobs to return. `start_len`: first prompt position whose logprob is wanted; -1: output only.

    `top_num`: alternatives per position (0: the chosen token only). `token_ids`: these ids' logprobs at each position too.
    """

    start_len: int = -1
    top_num: int = 0
    token_ids: tuple[int, ...] = ()


# ---- frontend -> scheduler


class GenerateRequest(_Message, frozen=True):
    """One sample. `sampling` is checked and complete (max_new_tokens and seed are set, n is 1).

    `stream`: the client streams; `stream_interval`: tokens between two messages to it (None: the engine's).
    `priority` counts where priority scheduling is on.
    `return_hidden_states`: of the prompt and of each generated token. `pooling` ("last" | "mean" | ""): an embedding,
    one vector for the prompt; nothing is generated (max_new_tokens is 0) and no KV is kept.
    `lora`: name of the adapter that computes it ("": the model alone).
    `timeout_s`: seconds from now after which the request is ended (None: no limit).
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    logprobs: LogprobOptions | None = None
    bootstrap: Bootstrap | None = None
    skip_cache_insert: bool = False
    stream: bool = False
    stream_interval: int | None = None
    priority: int = 0
    grammar_field: str = ""  # what the client calls the grammar in `sampling`: errors name it
    return_hidden_states: bool = False
    pooling: str = ""
    lora: str = ""
    timeout_s: float | None = None
    request_id: str = ""  # of the HTTP request that it is a sample of: log lines name it


class GenerateBatch(_Message, frozen=True):
    """The samples of one HTTP request: they arrive together, so no step begins with a part of them."""

    requests: list[GenerateRequest]


class AbortRequest(_Message, frozen=True):
    """End request `rid` (exact match), or every request when `all` is set. Unknown rids are ignored."""

    rid: str
    all: bool = False


class FlushCache(_Message, frozen=True):
    call_id: str


class GetState(_Message, frozen=True):
    """Request a `StateReply`. `check`: also run every owner's `check()` and report what it finds."""

    call_id: str
    check: bool = False


class PauseGeneration(_Message, frozen=True):
    """Stop computing until `ContinueGeneration`; requests that come meanwhile wait. Asks for a `ControlReply`.

    `mode`: what becomes of the live ones: "abort" ends them, "retract" takes their KV, "in_place" leaves it.
    """

    call_id: str
    mode: str


class ContinueGeneration(_Message, frozen=True):
    call_id: str


class UpdateWeights(_Message, frozen=True):
    """Take the weights of another checkpoint of the same shape. Asks for a `ControlReply`, when all is done.

    `weight_version`: its name from now on (None: as before). `abort_all`: live requests are aborted, not waited for.
    """

    call_id: str
    model_path: str
    weight_version: str | None = None
    abort_all: bool = False


class StartProfile(_Message, frozen=True):
    """Record what torch does, until `StopProfile` or for `num_steps` steps. Asks for a `ControlReply`.

    `output_dir`: folder of the trace file ("": a new temporary one). `activities`: "CPU" | "GPU".
    """

    call_id: str
    output_dir: str = ""
    num_steps: int | None = None
    activities: tuple[str, ...] = ()
    with_stack: bool = False
    record_shapes: bool = False


class StopProfile(_Message, frozen=True):
    call_id: str


class LoadAdapter(_Message, frozen=True):
    """Load the LoRA adapter in directory `path` under `name`. Asks for a `ControlReply` with `adapters`."""

    call_id: str
    name: str
    path: str


class UnloadAdapter(_Message, frozen=True):
    """Take no new request for adapter `name`; once no request uses it, forget it and answer, with `adapters`."""

    call_id: str
    name: str


class Drain(_Message, frozen=True):
    """The worker ends soon: what runs goes on, but peers are refused what they ask to have computed."""


class Shutdown(_Message, frozen=True):
    """End the scheduler's loop (the launcher's SIGTERM does the same)."""


ToScheduler = (
    GenerateRequest
    | GenerateBatch
    | AbortRequest
    | FlushCache
    | GetState
    | PauseGeneration
    | ContinueGeneration
    | UpdateWeights
    | StartProfile
    | StopProfile
    | LoadAdapter
    | UnloadAdapter
    | Drain
    | Shutdown
)

# ---- frontend -> heartbeat (a thread of the scheduler process that answers during a step, too)


class GetStep(_Message, frozen=True):
    """Ask what the loop's thread does: `StepReply`."""

    call_id: str


# ---- scheduler -> frontend


class FinishReason(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Why a request ended. `kind`: "stop" | "length" | "abort".

    `matched`: the stop token id, stop string or pattern (`regex`: it is the pattern). `status`: HTTP status for an abort that is an error (0: user's abort).
    `field`: the part of the request's body that it is about, if one is.
    """

    kind: str
    matched: int | str | None = None
    message: str = ""
    status: int = 0
    field: str = ""
    regex: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Logprob of the token at one position, with the `top` alternatives [(logprob, token_id)], best first.

    `requested`: the same for `LogprobOptions.token_ids`, in their order.
    `logprob` is None for the first prompt token, which nothing predicts.
    """

    logprob: float | None
    token_id: int
    top: list[tuple[float, int]] = []
    requested: list[tuple[float, int]] = []


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """A stage of a request, in seconds of the machine's monotonic clock. `num_tokens`: of a chunk."""

    name: str
    start_s: float
    end_s: float
    num_tokens: int = 0


class TokenOutput(msgspec.Struct, array_like=True, kw_only=True):
    """New tokens of one request. `input_logprobs` comes once, with the first output, `times` (seconds that each stage

    took, by name: engine/core/times.py) and `stages` (when) with the last. Hidden states are float32 in the machine's order, [hidden] a
    position: `input_hidden` all of the prompt's in one (once, with the first output; its last row sampled the first token),
    `hidden` one for each later token, or an embedding request's one pooled vector.
    """

    rid: str
    new_ids: list[int]
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    logprobs: list[TokenLogprob] = []
    input_logprobs: list[TokenLogprob] = []
    retractions: int = 0
    times: dict[str, float] = {}
    input_hidden: bytes = b""
    hidden: list[bytes] = []
    cached_by_tier: list[int] = []  # of cached_tokens: from device, host, disk; empty: there is one tier
    transfer_retries: int = 0  # times that a KV transfer for it began anew
    stages: list[Stage] = []


class TokenBatch(_Message, frozen=True):
    outputs: list[TokenOutput]


class FlushReply(_Message, frozen=True):
    call_id: str
    ok: bool
    message: str


class ControlReply(_Message, frozen=True):
    """Answer to a control message. `status`: HTTP status where it was refused. `values`: what the message asks for

    (model_path and weight_version after an update, trace file of a profile, paused requests).
    `adapters`: name -> path of the adapters that are loaded, wherever that may have changed.
    """

    call_id: str
    ok: bool
    message: str
    status: int = 200
    values: dict[str, int | str] = {}
    adapters: dict[str, str] | None = None


class StateReply(_Message, frozen=True):
    """Load and self-check of the scheduler; `queues` by name (bootstrap, waiting, inflight, prealloc, transfer...).

    `counters` only grow (requests, aborted, prompt_tokens, generation_tokens, cached_tokens, transfer_failed...).
    `problems`: what `check()` found, empty when all owners are consistent.
    """

    call_id: str
    role: str
    running: int
    queues: dict[str, int]
    num_pages: int
    page_size: int
    pages: dict[str, int]  # free, cached, held, quarantined
    counters: dict[str, float]
    gauges: dict[str, float]
    problems: list[str]


class StepInfo(msgspec.Struct, frozen=True):
    """A step. `kind`: "prefill" | "decode" | "mixed" (decodes ride along with prompts) | "copy" (of pages alone)."""

    seq: int
    kind: str
    num_reqs: int
    num_tokens: int


class StepReply(_Message, frozen=True):
    """What the loop's thread does at this moment, reported by another thread of the scheduler process.

    `busy_s`: seconds that the present turn (or the load of the model) has taken, None at rest. `stalled`: longer than
    --watchdog-timeout. `step`: what the turn computes, None outside a step.
    """

    call_id: str
    busy_s: float | None
    loading: bool = False
    stalled: bool = False
    step: StepInfo | None = None


class SchedulerReady(_Message, frozen=True):
    """Sent once when the model is loaded and the loop is about to start."""

    info: dict[str, int | float | str | bool | None]


ToFrontend = TokenBatch | FlushReply | ControlReply | StateReply | StepReply | SchedulerReady
