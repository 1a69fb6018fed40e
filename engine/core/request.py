"""Live request and its arithmetic. Only the scheduler changes it.

Token positions by page (page_size 4, prompt of 6, two tokens generated, one in flight):

  tokens      p p p p | p p o o | ?     p prompt, o output, ? sampled, not collected
  pages       row[0]    row[1]    row[2]
  shared_pages 1  -> row[:1] is in the radix tree (locked) or in dup_pages; row[1:] is its own
  computed_len    -> KV of these tokens is computed and collected: safe to share, send and cache
  launched_len    -> computed or in flight
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from engine.core.mem_cache.radix_cache import TRUNK, Branch, Node
from engine.core.plan import Phase
from engine.images import ImageInput, key_ids
from engine.messages import DraftCounts, FinishReason, GenerateRequest, LogprobOptions, Stage, TokenLogprob
from engine.sampling_params import SamplingParams

P = TypeVar("P")

MAX_CHUNKS = 64  # stored per request: enough for a chart


@dataclass(slots=True)
class Times:
    """Stage times of a request in worker clock seconds; `remote_*`: durations on prefill.

        unified   arrived -------------------- started -- first token -------- ended
                  |        queue_time          | prefill_time | decode_time    |
        prefill   arrived ------- queued ----- started -- computed ----------- ended
                  | bootstrap_time | queue_time | prefill_time | transfer_time |
        decode    arrived ------- queued (pages offered to prefill) ---- landed -- ended
                  | bootstrap_time | queue_time, prefill_time, transfer_time | decode_time |

    Stages sum to the total. Prefill's metadata row reports decode's queue_time and prefill_time;
    the rest is transfer.
    """

    arrived_s: float | None = None
    queued_s: float | None = None
    started_s: float | None = None
    computed_s: float | None = None  # prefill: the last chunk is done, handover begins
    landed_s: float | None = None  # decode: KV and metadata have landed
    first_token_s: float | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)  # launch time, number of tokens
    chunk_ends_s: list[float] = field(default_factory=list)  # ends of `chunks`; the last ends with the prefill
    bootstraps: bool = False  # waits for its other half before it is queued
    remote: bool = False  # another worker computes its prompt
    remote_queue_s: float = 0.0
    remote_prefill_s: float = 0.0

    @property
    def queue_s(self) -> float:
        return _span(self.queued_s if self.queued_s is not None else self.arrived_s, self.started_s)

    @property
    def prefill_s(self) -> float:
        return _span(self.started_s, self.computed_s if self.computed_s is not None else self.first_token_s)


def time_line(times: Times, *, ended_s: float, completion_tokens: int) -> dict[str, float]:
    """An ended request's completed stages, seconds by name.

    `decode_throughput`: tokens per second after the first.
    """
    passed = [stage for stage in stages(times, ended_s=ended_s) if stage.name != "chunk"]
    if passed and passed[-1].name not in ("transfer", "decode"):
        del passed[-1]  # it ended within this one
    line: dict[str, float] = {}
    for stage in passed:
        seconds = stage.end_s - stage.start_s
        if stage.name == "transfer_queue":
            line |= {"queue_time": times.remote_queue_s, "prefill_time": times.remote_prefill_s}
            line["transfer_time"] = max(0.0, seconds - (times.remote_queue_s + times.remote_prefill_s))
        else:
            line[f"{stage.name}_time"] = seconds
    if times.arrived_s is not None and times.first_token_s is not None:
        line["first_token_latency"] = times.first_token_s - times.arrived_s
        decoding_s = ended_s - times.first_token_s
        if completion_tokens > 1 and decoding_s > 0:
            line["decode_throughput"] = (completion_tokens - 1) / decoding_s
    return line


def stages(times: Times, *, ended_s: float) -> list[Stage]:
    """The stages in order; chunks lie inside `prefill`.

    Decode's `transfer_queue` lasts from the page offer to landing.
    """
    first_s = times.queued_s if times.queued_s is not None else times.arrived_s
    if times.arrived_s is None or first_s is None:
        return []
    line = [] if times.queued_s is None else [Stage("bootstrap", times.arrived_s, times.queued_s)]
    if times.bootstraps and times.queued_s is None:
        return [Stage("bootstrap", times.arrived_s, ended_s)]
    if times.landed_s is not None:
        return [*line, Stage("transfer_queue", first_s, times.landed_s), Stage("decode", times.landed_s, ended_s)]
    if times.started_s is None or times.remote:
        return [*line, Stage("transfer_queue" if times.remote else "queue", first_s, ended_s)]
    line.append(Stage("queue", first_s, times.started_s))
    computed_s = times.computed_s if times.computed_s is not None else times.first_token_s
    line.append(Stage("prefill", times.started_s, ended_s if computed_s is None else computed_s))
    line += _chunks(times, line[-1].end_s)
    if times.computed_s is not None:
        line.append(Stage("transfer", times.computed_s, ended_s))
    elif times.first_token_s is not None:
        line.append(Stage("decode", times.first_token_s, ended_s))
    return line


def _chunks(times: Times, computed_s: float) -> list[Stage]:
    open_ends = [computed_s] * (len(times.chunks) - len(times.chunk_ends_s))
    ends = [*times.chunk_ends_s, *open_ends]
    return [Stage("chunk", start_s, end_s, num) for (start_s, num), end_s in zip(times.chunks, ends, strict=True)]


def _span(start_s: float | None, end_s: float | None) -> float:
    return 0.0 if start_s is None or end_s is None else end_s - start_s


# ---- Interfaces of a request's grammar and stop search.


class Grammar(Protocol):
    """Grammar state of one request, advanced by committed tokens.

    `ended`: only an end token may follow, or did.
    """

    @property
    def ended(self) -> bool: ...

    @property
    def problem(self) -> str: ...

    def accept(self, token: int) -> bool:
        """False for an invalid token; then the state is unusable."""

    def bitmask(self) -> bytes:
        """Allowed tokens: bit t % 8 of byte t // 8; 4 * ceil(vocab_size / 32) bytes."""

    def forced(self) -> Sequence[int]:
        """Tokens that must come next, if known."""

    def fork(self) -> "Grammar":
        """An independent copy."""


# Compiled grammar shared by requests: makes an initial state. Cheap.
StartGrammar = Callable[[], Grammar]


class Stops(Protocol):
    """Search for stop strings and regexes (engine/text/incremental.py)."""

    def look(self, output_ids: Sequence[int]) -> FinishReason | None:
        """The stop in the last token's text; reads only new ids."""


# ---- Parts of a request, each changed by its owner.


@dataclass(slots=True, eq=False)
class Unsent:
    """`hidden_launched`: positions with hidden states computed or in flight."""

    logprobs: list[TokenLogprob] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_logprobs_sent: bool = False
    input_hidden: bytes = b""
    hidden: list[bytes] = field(default_factory=list)
    hidden_launched: int = 0


@dataclass(slots=True, eq=False)
class Stats:
    """`cached_by_tier`: device, host, disk; empty: one tier."""

    cached_tokens: int = 0
    cached_by_tier: list[int] = field(default_factory=list)
    retractions: int = 0
    preemptions: int = 0
    transfer_retries: int = 0
    drafts: DraftCounts | None = None


@dataclass(slots=True, eq=False)
class WindowRow:
    """WindowPages: `pages` parallel to a request's, 0: freed; none before `first` is left."""

    pages: list[int] = field(default_factory=list)
    first: int = 0
    num_synced: int = 0  # that the executor has


@dataclass(slots=True, eq=False)
class Recurrent:
    """StateSlots: a `slot` (0: none), ascending lengths with snapshots, slots of those in flight.

    `answer`: node of the answer's last snapshot. `pinned`: for a peer.
    """

    slot: int = 0
    pinned: int = 0
    snapshots_at: tuple[int, ...] = ()
    snapshots: dict[int, int] = field(default_factory=dict)
    answer: Node | None = None


@dataclass(slots=True, eq=False)
class Vision:
    """`rope_delta`: RoPE position minus position of the tokens after them.

    `num_arriving`: images whose features it waits for. `num_seen`: leading ones no longer needed.
    """

    rope_delta: int = 0
    num_arriving: int = 0
    num_seen: int = 0
    key_ids: list[int] | None = None  # of the prompt, made on demand


@dataclass(slots=True, frozen=True)
class LoadedAhead:
    """Pages loaded from the host ahead of a waiting request; `num_read` from files."""

    begin: int = 0
    end: int = 0
    num_read: int = 0

    @property
    def num_pages(self) -> int:
        return self.end - self.begin


class Variant(NamedTuple):
    """An adapter's load (engine/core/adapters.py); equal digests share KV."""

    number: int = 0  # base model
    digest: str = ""


BASE_MODEL = Variant()


@dataclass(slots=True, eq=False)
class LowerTiers:
    """`keys`: of first whole pages. `prefetching`: in reading, until a time."""

    keys: list[bytes] = field(default_factory=list)
    seed: bytes = b""
    prefetching: list[bytes] = field(default_factory=list)
    prefetch_until_s: float | None = None
    ahead: LoadedAhead = LoadedAhead()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A `prefill_only` one ends after its first token, and its role releases the pages."""

    # Fixed on arrival. What steps read often is copied from `message`.
    message: GenerateRequest
    rid: str = field(init=False)
    input_ids: list[int] = field(init=False)
    sampling: SamplingParams = field(init=False)
    images: tuple[ImageInput, ...] = field(init=False)  # in order of the prompt
    logprobs: LogprobOptions | None = field(init=False)
    eos_ids: frozenset[int] = frozenset()
    arrived_s: float
    prefill_only: bool = False
    grammar: Grammar | None = None  # advanced with every committed token
    keep_kv: bool = True  # others may find its KV; False after a failed step
    variant: Variant = BASE_MODEL
    stops: Stops | None = None  # advanced with its text; None: no stop strings and regexes
    serial: int = 0  # order of arrival
    vision: Vision = field(default_factory=Vision)

    # Results: generated tokens, and the end
    output_ids: list[int] = field(init=False)  # those of earlier workers first
    finish: FinishReason | None = None
    moves: bool = False  # left the batch: another worker continues with its KV
    abort: FinishReason | None = None  # reason to end with, at the next check
    unsent: Unsent = field(default_factory=Unsent)
    stats: Stats = field(default_factory=Stats)
    times: Times = field(default_factory=Times)

    # Memory, RequestTable: location
    pages: list[int] = field(default_factory=list)
    shared_pages: int = 0
    dup_pages: list[int] = field(default_factory=list)
    lock: Node | None = None
    windows: WindowRow = field(default_factory=WindowRow)
    recurrent: Recurrent = field(default_factory=Recurrent)
    slot: int | None = None
    phase: Phase | None = None  # of the stream with its row, if there are two
    num_synced_pages: int = 0  # pages that the executor has
    lower_tiers: LowerTiers = field(default_factory=LowerTiers)
    arriving: bool = False  # waits for its prefix from another worker

    # Planner and Results: progress of steps
    launched_len: int = 0
    computed_len: int = 0
    inflight: int = 0  # launched steps not collected
    pending: int = 0  # those that sample a token
    admitted: bool = False
    saved_len: int = 0  # Backups: tokens with KV on the host, or on the way
    parts: dict[type, Any] = field(default_factory=dict)  # state of features, by `of`

    def __post_init__(self) -> None:
        message = self.message
        self.rid, self.input_ids, self.sampling = message.rid, message.input_ids, message.sampling
        self.logprobs, self.images = message.logprobs, tuple(message.images)
        self.output_ids, self.unsent.input_logprobs_sent = list(message.output_ids), self.num_resumed > 0

    def of(self, kind: type[P]) -> P:
        """The request's state of a feature, which begins as `kind()`."""
        found: P | None = self.parts.get(kind)
        if found is None:
            found = self.parts[kind] = kind()
        return found

    @property
    def num_resumed(self) -> int:
        return len(self.message.output_ids)

    @property
    def branch(self) -> Branch:
        namespace = self.message.namespace
        return Branch(self.variant.digest, namespace) if self.variant.digest or namespace else TRUNK

    @property
    def ended(self) -> bool:
        return self.finish is not None

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids) + len(self.output_ids)

    @property
    def handed_tokens(self) -> int:
        """Tokens with KV in a handover; a moved request's last token is not computed yet."""
        if self.moves:
            return self.num_tokens - 1
        return len(self.input_ids) + self.num_resumed - (self.message.source is not None)

    @property
    def max_new_tokens(self) -> int:
        if self.prefill_only:
            return min(self.num_resumed + 1, self.sampling.max_new_tokens or 0)
        assert self.sampling.max_new_tokens is not None, "the frontend fills it in"
        return self.sampling.max_new_tokens

    @property
    def tokens_left(self) -> int:
        """Remaining tokens, with those in flight."""
        return max(0, self.max_new_tokens - len(self.output_ids))

    @property
    def samples_left(self) -> int:
        """Remaining samples, without those in flight."""
        return self.max_new_tokens - len(self.output_ids) - self.pending

    @property
    def wants_input_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs.start_len >= 0 and not self.output_ids

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens start..end-1, across prompt and output."""
        prompt = len(self.input_ids)
        if end <= prompt:
            return self.input_ids[start:end]
        if start >= prompt:
            return self.output_ids[start - prompt : end - prompt]
        return self.input_ids[start:] + self.output_ids[: end - prompt]

    def key_tokens(self, start: int, end: int) -> list[int]:
        """Ids for prefix comparison; images have their own (engine/images.py)."""
        found = self.tokens(start, end)
        if self.images:
            if self.vision.key_ids is None:
                self.vision.key_ids = key_ids(self.images, self.input_ids, 0)
            prompt = self.vision.key_ids[start:end]
            found[: len(prompt)] = prompt
        return found

    def own_pages(self) -> list[int]:
        return self.dup_pages + self.pages[self.shared_pages :]
