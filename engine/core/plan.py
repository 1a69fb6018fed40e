"""One step as the scheduler plans it, and its result. Plain data: no torch, no I/O.

A `Plan` is all the executor needs; it never looks at a request.
"""

from dataclasses import dataclass, field

import msgspec

from engine.core.dp_step import AgreedStep
from engine.core.drafts import Guess
from engine.core.lanes import STREAMS, Lane
from engine.images import ImageInput, RopePositions
from engine.messages import LogprobOptions, TokenLogprob
from engine.sampling_params import SamplingParams


@dataclass(slots=True, frozen=True)
class SlotOpen:
    """A request gets a row of the request table. `prompt_ids` and `output_ids` (after a resumption) feed the penalties.

    `adapter`: number of the LoRA adapter that computes it; 0: the model alone. `state`: its slot of recurrent state; 0: the model
    has none.
    """

    slot: int
    sampling: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    eos_ids: tuple[int, ...]
    adapter: int = 0
    state: int = 0


class FeatureRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of an item whose embeddings are features of image `key`: rows `at`..`at + count - 1` are its tokens from `first` on."""

    at: int
    key: bytes
    first: int
    count: int


class ItemImages(msgspec.Struct, frozen=True, array_like=True):
    """The images of an item: `rows` of features, and RoPE positions of its tokens.

    `rope`: None: they follow one another from `start + rope_delta` on.
    """

    rows: tuple[FeatureRows, ...] = ()
    rope: RopePositions | None = None
    rope_delta: int = 0


class FeatureLand(msgspec.Struct, frozen=True, array_like=True):
    """The features of image `key`, `num_tokens` rows, lie in `pages` of the pool in which they arrive from encode workers."""

    key: bytes
    pages: list[int]
    num_tokens: int


class PlanItem(msgspec.Struct, frozen=True):
    """One request's part of a step; with drafts, one of its rows. A struct: a frozen dataclass costs 1 us for every request and step.

    tokens:       [q_len] ids at positions start..; -(slot+1) stands for the token that `slot` sampled last
    start:        tokens whose KV is in the pages already
    page_start:   `new_pages` go to this index of the slot's page row
    sample:       sample a token after the last position
    output_len:   output tokens before this step: the position of the sample (seeds, min_new_tokens)
    extend:       part of a prompt, or of what a retracted request computes again
    logprob_from: first position whose own logprob is wanted in this step
    hidden_from:  first position whose hidden state is wanted in this step
    window_start: as `page_start`, for `new_window`: pages of layers with a window; 0 where a page is gone
    pool:         "last" | "mean": instead, one vector of these positions: the last state, or their sum
    behind:       its token is a guess of what the item `behind` items before it, of the same request, samples
                  (engine/core/drafting.py); 0: it is known, or in flight
    place:        its KV goes where the token at this position has its place in the pages, and moves to its own place once it is
                  accepted; -1: it has its own (engine/core/draft_rows.py)
    to_draft:     passes of the executor's drafter behind the item's token, which nothing else computes in this step: each drafts
                  the next token, or with trees the next ones
    topk:         tokens that such a pass guesses for each place, and paths that the next one goes on from; the same of all items
    images:       of its request; None: its tokens are text before any
    """

    rid: str
    slot: int
    tokens: list[int]
    start: int
    page_start: int
    new_pages: list[int]
    sample: bool
    output_len: int
    extend: bool
    logprobs: LogprobOptions | None = None
    logprob_from: int | None = None
    logprob_next: int | None = None  # prompt token after this chunk (its logprob comes from this chunk's last logits)
    hidden_from: int | None = None
    pool: str = ""
    window_start: int = 0
    new_window: list[int] = []
    behind: int = 0
    place: int = -1
    to_draft: int = 0
    topk: int = 1
    images: ItemImages | None = None

    @property
    def draft(self) -> bool:
        """Whether its token is a guess."""
        return self.behind > 0

    @property
    def q_len(self) -> int:
        return len(self.tokens)

    @property
    def kv_len(self) -> int:
        """Count the tokens in the KV cache after this step."""
        return self.start + len(self.tokens)


@dataclass(slots=True, frozen=True)
class PageSave:
    """Copy `pages` to host memory under `key`; with them the pages of the last `window`, and the slot of a recurrent `state` (0: none)."""

    key: int
    pages: list[int]
    window: list[int] = field(default_factory=list)
    state: int = 0


@dataclass(slots=True, frozen=True)
class PageLoad:
    """Copy pages `start`.. of copy `key` into `pages`, all of its window into `window`, its state into `state`; and forget the copy."""

    key: int
    start: int
    pages: list[int]
    window: list[int] = field(default_factory=list)
    state: int = 0


@dataclass(slots=True, frozen=True)
class PageCopy:
    """A copy between a device page and a page of the host tier."""

    page: int
    host_page: int


@dataclass(slots=True, frozen=True)
class StateCopy:
    """Slot `dst` of recurrent states becomes a copy of slot `src`; None: the state before a request's first token, zero."""

    src: int | None
    dst: int


@dataclass(slots=True, frozen=True)
class StateRewind:
    """The state of the request in row `slot` becomes that behind its first `length` tokens.

    It is behind drafts that were rejected, of the last step that had some.
    """

    slot: int
    length: int


@dataclass(slots=True)
class Plan:
    """One step, which may have no items. `extend`: some item is part of a prompt; decodes may ride along.

    `wait`: the loop launches this one without overlap (depth 1, or with pipeline stages as many as there are micro-batches).
    `masks`: by item index, the tokens that it may sample (`Grammar.bitmask`); filled in just before sampling is launched.
    `sample_deferred`: some masks follow from tokens in flight, so sampling is launched when these are collected.
    `agreed`: with DP attention, the step as all ranks compute it, filled in before launch; None: it has none of their layers.
    `joins`: with DP attention, only other ranks have something for the step.
    `lane`: with PD multiplexing, whose steps run in the order of their plans; None: those of all plans do.

    `states`: what requests with recurrent state begin from; `snapshots`: copies of states as the step leaves them. Each in order.
    `rewinds`: states behind drafts that an earlier step verified, which no step has read since.
    `encodes`: images whose features the step computes first; `forgets`: keys of those whose features go before that; `lands`: features
    that are copied from where another worker has written them.

    Order that the executor owes: `rewinds`, `to_host`, `from_host`, `drops` (copies to forget), `loads`, `saves`, `closes`, `opens`, `states`,
    page rows of `items`, `forgets`, `lands`, `encodes`, forward, `snapshots`, sampling.
    """

    seq: int
    extend: bool
    items: list[PlanItem]
    opens: list[SlotOpen] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)
    wait: bool = False
    masks: dict[int, bytes] = field(default_factory=dict)
    saves: list[PageSave] = field(default_factory=list)
    loads: list[PageLoad] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    to_host: list[PageCopy] = field(default_factory=list)
    from_host: list[PageCopy] = field(default_factory=list)
    states: list[StateCopy] = field(default_factory=list)
    snapshots: list[StateCopy] = field(default_factory=list)
    rewinds: list[StateRewind] = field(default_factory=list)
    encodes: list[ImageInput] = field(default_factory=list)
    forgets: list[bytes] = field(default_factory=list)
    lands: list[FeatureLand] = field(default_factory=list)
    sample_deferred: bool = False
    agreed: AgreedStep | None = None
    joins: bool = False
    lane: Lane | None = None

    @property
    def stream(self) -> int:
        """Return the number of the executor's stream that runs the step."""
        return 0 if self.lane is None else STREAMS[self.lane]

    @property
    def only_drafts(self) -> bool:
        """Whether the executor's drafter drafts for the items, and the model computes nothing."""
        return bool(self.items) and self.items[0].to_draft > 0

    @property
    def copies_pages(self) -> bool:
        return bool(self.saves or self.loads or self.to_host or self.from_host)


class ItemResult(msgspec.Struct):
    """`token`: sampled id, if any. `input_logprobs`: for positions from `logprob_from`. `drafted`: in `to_draft` passes.

    `hidden`: float32 rows, one for each position from `hidden_from`, or one when they are pooled.
    """

    token: int | None
    logprob: TokenLogprob | None = None
    input_logprobs: list[TokenLogprob] = []  # each its own: msgspec copies an empty default
    bad: bool = False  # NaN logits
    hidden: bytes = b""
    drafted: list[Guess] = []


@dataclass(slots=True)
class StepResult:
    """`items`: parallel to `Plan.items`. `failure`: why the step has no results, and its items are empty; "": it has."""

    seq: int
    items: list[ItemResult]
    failure: str = ""
