"""The messages between the processes of one worker: tagged msgspec structs in msgpack, in closed unions.

frontend (HTTP, tokens <-> text)  --ToScheduler-->  scheduler
scheduler                         --ToFrontend-->   frontend
"""

import msgspec

from engine.sampling_params import SamplingParams

MAX_ASKED_TOKEN_IDS = 128  # of LogprobOptions.token_ids: what a metadata row holds
FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # as in SGLang: fake the transfer of this request


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Bootstrap(msgspec.Struct, frozen=True, array_like=True):
    """A transfer's room. `host` and `port` name the bootstrap server."""

    host: str
    port: int
    room: int


class LogprobOptions(msgspec.Struct, frozen=True, array_like=True):
    """`start_len`: first prompt position whose logprob is wanted; -1: output only.

    `top_num`: alternatives per position. `token_ids`: ids whose logprobs are wanted at each position, too.
    """

    start_len: int = -1
    top_num: int = 0
    token_ids: tuple[int, ...] = ()


# ---- frontend -> scheduler


class GenerateRequest(_Message, frozen=True):
    """One sample. `sampling` is checked and complete (max_new_tokens and seed are set, n is 1).

    `stream_interval`: tokens between two messages; None: the engine's. `alone`: the worker that computes the prompt answers,
    without a decode worker. `pooling` ("last" | "mean" | ""): an embedding of the prompt, or ("labels") a classifier's logits; nothing is generated (max_new_tokens is 0).
    `unit`: the embedding is scaled to unit length. `lora`: name of the adapter; "": the model alone.
    `timeout_s`: from now; None: no limit.
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
    grammar_field: str = ""  # the client's name of the grammar, for errors
    return_hidden_states: bool = False
    pooling: str = ""
    unit: bool = True
    alone: bool = False
    lora: str = ""
    timeout_s: float | None = None
    request_id: str = ""  # of the HTTP request, for log lines
    namespace: tuple[str, ...] = ()  # of the prefix cache


class GenerateBatch(_Message, frozen=True):
    """The samples of one HTTP request, which enter the same step."""

    requests: list[GenerateRequest]


class AbortRequest(_Message, frozen=True):
    """End request `rid`, or every request when `all` is set. Unknown rids are ignored."""

    rid: str
    all: bool = False


class FlushCache(_Message, frozen=True):
    call_id: str


class GetState(_Message, frozen=True):
    """Request a `StateReply`. `check`: run every owner's `check()` first."""

    call_id: str
    check: bool = False


class PauseGeneration(_Message, frozen=True):
    """Stop computing until `ContinueGeneration`; new requests wait. Answered by a `ControlReply`.

    `mode`: "abort" ends live requests, "retract" takes their KV, "in_place" leaves it. "block" lets them go on.
    """

    call_id: str
    mode: str


class ContinueGeneration(_Message, frozen=True):
    call_id: str


class UpdateWeights(_Message, frozen=True):
    """Take the weights of another checkpoint of the same shape. Answered by a `ControlReply` when done.

    `weight_version`: None: as before. `abort_all`: abort live requests instead of waiting for them.
    """

    call_id: str
    model_path: str
    weight_version: str | None = None
    abort_all: bool = False


class ReleaseMemory(_Message, frozen=True):
    """Give memory back until `ResumeMemory`: `tags` of "kv_cache", "weights", "cuda_graph"; (): all. Answered by a `ControlReply`."""

    call_id: str
    tags: tuple[str, ...] = ()


class ResumeMemory(_Message, frozen=True):
    call_id: str
    tags: tuple[str, ...] = ()


class StartProfile(_Message, frozen=True):
    """Profile torch until `StopProfile` or for `num_steps` steps. Answered by a `ControlReply`.

    `output_dir`: "": a new temporary one. `activities`: "CPU" | "GPU".
    """

    call_id: str
    output_dir: str = ""
    num_steps: int | None = None
    activities: tuple[str, ...] = ()
    with_stack: bool = False
    record_shapes: bool = False


class StopProfile(_Message, frozen=True):
    call_id: str


class RecordExperts(_Message, frozen=True):
    """Count which experts tokens take: `action` start | stop | dump, into a file in `output_dir` ("": a new temporary one).

    Answered by a `ControlReply`.
    """

    call_id: str
    action: str
    output_dir: str = ""


class LoadAdapter(_Message, frozen=True):
    """Load the LoRA adapter in directory `path` under `name`. Answered by a `ControlReply` with `adapters`."""

    call_id: str
    name: str
    path: str


class UnloadAdapter(_Message, frozen=True):
    """Refuse new requests for adapter `name`, and unload it once unused. Answered by a `ControlReply` with `adapters`."""

    call_id: str
    name: str


class Drain(_Message, frozen=True):
    """Refuse work of peers from now on: the worker ends soon."""


class Shutdown(_Message, frozen=True):
    """End the scheduler's loop, as SIGTERM does."""


ToScheduler = (
    GenerateRequest
    | GenerateBatch
    | AbortRequest
    | FlushCache
    | GetState
    | PauseGeneration
    | ContinueGeneration
    | UpdateWeights
    | ReleaseMemory
    | ResumeMemory
    | StartProfile
    | StopProfile
    | RecordExperts
    | LoadAdapter
    | UnloadAdapter
    | Drain
    | Shutdown
)

# ---- frontend -> heartbeat, a thread of the scheduler process


class GetStep(_Message, frozen=True):
    """Request a `StepReply`."""

    call_id: str


# ---- scheduler -> frontend


class FinishReason(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Why a request ended. `kind`: "stop" | "length" | "abort".

    `matched`: the stop token id, stop string or pattern (`regex`). `status`: HTTP status of an error; 0: aborted by the user.
    `field`: of the request's body, where the error is about one.
    """

    kind: str
    matched: int | str | None = None
    message: str = ""
    status: int = 0
    field: str = ""
    regex: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Logprob of the token at one position (None for the first of a prompt), with the `top` alternatives, best first.

    `requested`: of `LogprobOptions.token_ids`, in their order.
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


class DraftCounts(msgspec.Struct, array_like=True, frozen=True):
    """Speculation of one request so far. `steps`: that verified its drafts, or could have; `drafted`, `accepted`: tokens."""

    steps: int
    drafted: int
    accepted: int


class TokenOutput(msgspec.Struct, array_like=True, kw_only=True):
    """New tokens of one request. The first output has `input_logprobs` and `input_hidden`; the last has `times` and `stages`.

    Hidden states are float32 in the machine's order, [hidden] a position: `input_hidden` those of the prompt (the last row
    sampled the first token), `hidden` one for each later token, or an embedding's pooled vector.
    `times`: seconds by stage (engine/core/times.py).
    """

    rid: str
    new_ids: list[int]
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    logprobs: list[TokenLogprob] = []
    input_logprobs: list[TokenLogprob] = []
    retractions: int = 0  # `preemptions` among them
    preemptions: int = 0
    times: dict[str, float] = {}
    input_hidden: bytes = b""
    hidden: list[bytes] = []
    cached_by_tier: list[int] = []  # of cached_tokens: from device, host, disk; empty: there is one tier
    transfer_retries: int = 0
    stages: list[Stage] = []
    drafts: DraftCounts | None = None  # of a worker that speculates


class TokenBatch(_Message, frozen=True):
    outputs: list[TokenOutput]


class ControlReply(_Message, frozen=True):
    """Answer to a control message.

    `status`: HTTP status of a refusal. `values`: model_path and weight_version after an update, trace file of a profile,
    retracted requests, released memory. `adapters`: name -> path of those loaded, where that may have changed.
    """

    call_id: str
    ok: bool
    message: str
    status: int = 200
    values: dict[str, int | str] = {}
    adapters: dict[str, str] | None = None


class TransferPath(msgspec.Struct, frozen=True):
    """How KV gets to a decode worker, measured when prefill connected to it.

    `peer`: incarnation of its transfers. `same_machine`: None: unknown. `transport`: "tcp", "rdma", "cma", "cuda_ipc" or "unknown".
    """

    peer: str
    address: str
    same_machine: bool | None
    transport: str
    gb_per_s: float
    measured_unix_s: float


class StateReply(_Message, frozen=True):
    """Load of the scheduler, its queues by name, totals since start (`counters`), and findings of `check()`.

    `transfer_paths`: of the newest peers of a prefill worker.
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
    transfer_paths: list[TransferPath] = []


class StepInfo(msgspec.Struct, frozen=True):
    """A step. `kind`: "prefill" | "decode" | "mixed" | "draft" (by a model) | "copy" (of pages alone)."""

    seq: int
    kind: str
    num_reqs: int
    num_tokens: int


class StepReply(_Message, frozen=True):
    """What the loop's thread does at this moment.

    `busy_s`: duration of the present turn or of the model's load; None at rest. `stalled`: longer than --watchdog-timeout.
    """

    call_id: str
    busy_s: float | None
    loading: bool = False
    stalled: bool = False
    step: StepInfo | None = None


class SchedulerReady(_Message, frozen=True):
    """Sent once, when the model is loaded."""

    info: dict[str, int | float | str | bool | list[int] | None]


ToFrontend = TokenBatch | ControlReply | StateReply | StepReply | SchedulerReady
