"""One live request and its arithmetic. Only the scheduler changes it.

Token positions of a request, page by page (page_size 4, prompt of 6, two tokens generated, one more in flight):

    tokens      p p p p | p p o o | ?              p prompt, o output, ? sampled but not collected yet
    pages       row[0]    row[1]    row[2]
    shared_pages 1  -> row[:1] is in the radix tree (locked) or in dup_pages; row[1:] is the request's own
    computed_len    -> KV of these tokens has been computed and collected: safe to share, send and cache
    launched_len    -> ... has been computed or is in flight
"""

from dataclasses import dataclass, field

from engine.core.drafts import Drafts
from engine.core.hooks import Grammar, Stops
from engine.core.lanes import Lane
from engine.core.radix_node import TRUNK, Branch, Node
from engine.core.times import Times
from engine.images import ImageInput, key_ids
from engine.messages import Bootstrap, FeatureSource, FinishReason, KVSource, LogprobOptions, PrefixSource, TokenLogprob
from engine.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Unsent:
    """Fields of the next output; names as in TokenOutput."""

    logprobs: list[TokenLogprob] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_hidden: bytes = b""
    hidden: list[bytes] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class LoadedAhead:
    """Pages `begin`..`end` - 1 of a waiting request came from the host before its turn; `num_read` of them were read from files."""

    begin: int = 0
    end: int = 0
    num_read: int = 0

    @property
    def num_pages(self) -> int:
        return self.end - self.begin


@dataclass(slots=True, eq=False)
class LowerTiers:
    """The host cache's own state of a request.

    `keys`: of its first whole pages, in the chain that begins at `seed`. `prefetching`: keys that are read from disk for it;
    it waits for them until `prefetch_until_s`.
    """

    keys: list[bytes] = field(default_factory=list)
    seed: bytes = b""
    prefetching: list[bytes] = field(default_factory=list)
    prefetch_until_s: float | None = None
    ahead: LoadedAhead = LoadedAhead()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """`prefill_only`: ends after its first token, and keeps its pages until the prefill role releases it."""

    # Fixed on arrival
    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    eos_ids: frozenset[int]
    arrived_s: float
    logprobs: LogprobOptions | None = None
    bootstrap: Bootstrap | None = None
    prefill_only: bool = False
    priority: int = 0
    grammar: Grammar | None = None  # advanced with every committed token
    keep_kv: bool = True  # others may find its KV; no more once a step of it has failed
    return_hidden_states: bool = False
    alone: bool = False  # answered by the worker of its prompt, in any role
    pooling: str = ""  # "last" | "mean": an embedding request; "labels": one of a classifier
    unit: bool = True  # the embedding is scaled to unit length
    adapter: int = 0  # number of the adapter's load (engine/core/adapters.py); 0: the model alone
    namespace: tuple[str, ...] = ()  # of the prefix cache: it shares KV with requests of the same one
    request_id: str = ""  # of the HTTP request, for log lines
    stops: Stops | None = None  # advanced with its text; None: it has no stop strings and regexes
    serial: int = 0  # order of arrival
    num_resumed: int = 0  # of `output_ids`, how many another worker generated before
    source: KVSource | None = None  # that worker, if it sends the KV of all tokens but the last
    prefix_source: PrefixSource | None = None  # a prefill worker that has the KV of its beginning
    images: tuple[ImageInput, ...] = ()  # of its prompt, in order
    encoders: tuple[FeatureSource | None, ...] = ()  # of `images`, the encode workers that a router names
    rope_delta: int = 0  # RoPE position minus position of the tokens behind them

    # Results: what it has generated, and how it ends
    output_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    moves: bool = False  # it has left the batch: another worker goes on with its KV
    abort: FinishReason | None = None  # to end with; takes effect at the next check
    unsent: Unsent = field(default_factory=Unsent)
    input_logprobs_sent: bool = False

    # Memory, RequestTable: where it lies
    pages: list[int] = field(default_factory=list)
    shared_pages: int = 0
    dup_pages: list[int] = field(default_factory=list)
    lock: Node | None = None
    window: list[int] = field(default_factory=list)  # beside `pages`, of layers with a window; 0: gone
    window_first: int = 0  # of `window`, the first page that is not gone
    state: int = 0  # slot of its recurrent state; 0: none
    snapshots_at: tuple[int, ...] = ()  # ascending: lengths at which copies of it are kept
    snapshots: dict[int, int] = field(default_factory=dict)  # of those, slots of the copies that are in flight
    answer_snapshot: Node | None = None  # where the last one of its answer is
    slot: int | None = None
    lane: Lane | None = None  # with PD multiplexing, in which its row is open
    num_synced_pages: int = 0  # of `pages`, how many the executor knows
    num_synced_window: int = 0  # of `window`
    lower_tiers: LowerTiers = field(default_factory=LowerTiers)
    arriving: bool = False  # its prefix is on its way from another worker: it waits
    features_arriving: int = 0  # of how many images features are on their way from encode workers: it waits, too

    # Planner and Results: how far its steps have got
    launched_len: int = 0
    computed_len: int = 0
    hidden_launched: int = 0  # positions whose hidden state was computed or is in flight
    inflight: int = 0  # launched steps that are not collected
    pending: int = 0  # of those, how many sample a token
    drafts: Drafts = field(default_factory=Drafts)
    admitted: bool = False
    saved_len: int = 0  # Backups: tokens whose KV is copied to the host, or on its way there
    num_seen_images: int = 0  # ImageCache: of `images`, the first ones whose features it no longer needs
    _key_ids: list[int] | None = field(default=None, init=False)  # of a prompt with images, once they are needed

    # What has happened to it, for its outputs
    cached_tokens: int = 0
    cached_by_tier: list[int] = field(default_factory=list)  # of `cached_tokens`: device, host, disk; empty: one tier
    retractions: int = 0
    preemptions: int = 0
    transfer_retries: int = 0
    times: Times = field(default_factory=Times)

    @property
    def branch(self) -> Branch:
        """Return where its prefixes are in the radix tree."""
        return Branch(self.adapter, self.namespace) if self.adapter or self.namespace else TRUNK

    @property
    def num_tokens(self) -> int:
        """Count the tokens known on the host."""
        return len(self.input_ids) + len(self.output_ids)

    @property
    def handed_tokens(self) -> int:
        """Count the tokens whose KV one worker hands to another: the prompt, and what was generated before.

        Of a request that moves from decode to decode the last token's is not computed yet.
        """
        if self.moves:
            return self.num_tokens - 1
        return len(self.input_ids) + self.num_resumed - (self.source is not None)

    @property
    def max_new_tokens(self) -> int:
        if self.prefill_only:
            return min(self.num_resumed + 1, self.sampling.max_new_tokens or 0)
        assert self.sampling.max_new_tokens is not None, "the frontend fills it in"
        return self.sampling.max_new_tokens

    @property
    def tokens_left(self) -> int:
        """Count the tokens that its limit leaves, with those in flight."""
        return max(0, self.max_new_tokens - len(self.output_ids))

    @property
    def samples_left(self) -> int:
        """Count the tokens that may still be sampled, besides those in flight."""
        return self.max_new_tokens - len(self.output_ids) - self.pending

    @property
    def wants_input_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs.start_len >= 0 and not self.output_ids

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the known tokens at positions start..end-1, across the prompt's end."""
        prompt = len(self.input_ids)
        if end <= prompt:
            return self.input_ids[start:end]
        if start >= prompt:
            return self.output_ids[start - prompt : end - prompt]
        return self.input_ids[start:] + self.output_ids[: end - prompt]

    def key_tokens(self, start: int, end: int) -> list[int]:
        """Return what stands for these tokens wherever prefixes are compared: in an image ids of its own (engine/images.py)."""
        found = self.tokens(start, end)
        if self.images:
            if self._key_ids is None:
                self._key_ids = key_ids(self.images, self.input_ids, 0)
            prompt = self._key_ids[start:end]
            found[: len(prompt)] = prompt
        return found

    def own_pages(self) -> list[int]:
        return self.dup_pages + self.pages[self.shared_pages :]
