"""A planned step and its result, as plain data: no torch, no I/O. Executors see no request."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec

from engine.core.dp_step import AgreedStep
from engine.images import ImageInput, RopePositions
from engine.messages import LogprobOptions, TokenLogprob
from engine.sampling_params import SamplingParams


class Phase(Enum):
    """Phase of a plan's steps, where these have a stream each."""

    PREFILL = "prefill"
    DECODE = "decode"


STREAMS = {Phase.DECODE: 0, Phase.PREFILL: 1}  # of an executor; steps without a phase run on the first


@dataclass(slots=True, frozen=True)
class SlotOpen:
    """A new row of the request table; `prompt_ids` and a resumption's `output_ids` feed penalties.

    `adapter`: number, 0 for the base model. `state`: slot of recurrent state, or 0.
    """

    slot: int
    sampling: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    eos_ids: tuple[int, ...]
    adapter: int = 0
    state: int = 0


class FeatureRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows `at`..`at + count - 1` of an item: features of image `key` from token `first`."""

    at: int
    key: bytes
    first: int
    count: int


class ItemImages(msgspec.Struct, frozen=True, array_like=True):
    """Positions without `rope` count on from `start + rope_delta`."""

    rows: tuple[FeatureRows, ...] = ()
    rope: RopePositions | None = None
    rope_delta: int = 0


class FeatureLand(msgspec.Struct, frozen=True, array_like=True):
    """Features of image `key` (`num_tokens` rows) in `pages` written by an encode worker."""

    key: bytes
    pages: list[int]
    num_tokens: int


class PlanItem(msgspec.Struct, frozen=True):
    """One request's rows of a step; each draft is an item. A frozen dataclass costs 1 us more each.

    tokens:       [q_len] ids from `start`; -(slot+1) is the slot's last sampled token
    start:        tokens with KV in the pages
    page_start:   index of `new_pages` in the slot's page row
    sample:       sample a token after the last position
    output_len:   position of the sample: earlier output tokens (seeds, min_new_tokens)
    extend:       part of a prompt, or of a recomputation
    logprob_from: first position with a wanted logprob
    hidden_from:  first position with a wanted hidden state
    window_start: `page_start` of `new_window` (0: freed page)
    pool:         "last" | "mean": one vector instead, the last state or the sum
    behind:       draft of the sample of the item `behind` places earlier; 0: no draft
    place:        position whose KV place it uses until accepted; -1: its own (draft_rows.py)
    to_draft:     drafter passes after the token, in a step that only drafts
    topk:         candidates per place, and paths that continue; equal for all items
    unverified:   drafts in flight before it, which may add to `start` and `output_len`
    images:       None before the request's first image
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
    unverified: int = 0
    images: ItemImages | None = None

    @property
    def draft(self) -> bool:
        return self.behind > 0

    @property
    def q_len(self) -> int:
        return len(self.tokens)

    @property
    def kv_len(self) -> int:
        return self.start + len(self.tokens)


class PageSave(msgspec.Struct, frozen=True, array_like=True):
    """Host copy under `key` of `pages`, the last `window` and a recurrent `state` (0: none)."""

    key: int
    pages: list[int]
    window: list[int] = []
    state: int = 0


class PageLoad(msgspec.Struct, frozen=True, array_like=True):
    """Load copy `key` from its page `start` on, with its whole window and state, and drop it."""

    key: int
    start: int
    pages: list[int]
    window: list[int] = []
    state: int = 0


class PageCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy between the device and the host tier."""

    page: int
    host_page: int


class StateCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy of recurrent state slot `src`, or of the zero state if None."""

    src: int | None
    dst: int
    from_host: bool = False


class StateRollback(msgspec.Struct, frozen=True, array_like=True):
    """Rollback of a row's state to `length` tokens, as the last verify step rejected drafts."""

    slot: int
    length: int


@dataclass(slots=True)
class Plan:
    """One step, perhaps without items. `extend`: with parts of prompts.

    - wait: launch without overlap (depth 1, or the number of micro-batches)
    - masks: allowed tokens by item index (`Grammar.bitmask`), set before sampling
    - sample_deferred: masks depend on tokens in flight, so sampling waits for these
    - agreed: with DP attention, the step of all ranks, set before launch
    - joins: with DP attention, only other ranks have items
    - phase: if given, steps run in plan order per phase
    - states, snapshots: copies before and after the step, each in order
    - `rewinds`: rollbacks of states that no step has read since verification
    - encodes, forgets, lands: image features to compute, drop, copy from an encode worker

    Execution order: `rewinds`, `states_to_host`, `to_host`, `from_host`, `drops` (of copies),
    `loads`, `saves`, `closes`, `opens`, `states`, page rows, `forgets`, `lands`, `encodes`,
    forward, `snapshots`, sampling.
    """

    seq: int
    extend: bool
    items: list[PlanItem]
    opens: list[SlotOpen] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)
    masks: dict[int, bytes] = field(default_factory=dict)
    saves: list[PageSave] = field(default_factory=list)
    loads: list[PageLoad] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    to_host: list[PageCopy] = field(default_factory=list)
    from_host: list[PageCopy] = field(default_factory=list)
    states_to_host: list[PageCopy] = field(default_factory=list)
    states: list[StateCopy] = field(default_factory=list)
    snapshots: list[StateCopy] = field(default_factory=list)
    rewinds: list[StateRollback] = field(default_factory=list)
    encodes: list[ImageInput] = field(default_factory=list)
    forgets: list[bytes] = field(default_factory=list)
    lands: list[FeatureLand] = field(default_factory=list)
    sample_deferred: bool = False
    agreed: AgreedStep | None = None
    joins: bool = False
    phase: Phase | None = None

    @property
    def warms_up(self) -> bool:
        """The scheduler counts from 1."""
        return self.seq == 0

    @property
    def stream(self) -> int:
        return 0 if self.phase is None else STREAMS[self.phase]

    @property
    def skips_model(self) -> bool:
        """True for a step of the executor's drafter, without the model."""
        return bool(self.items) and self.items[0].to_draft > 0

    @property
    def copies_pages(self) -> bool:
        of_states = self.states_to_host or any(copy.from_host for copy in self.states)
        return bool(self.saves or self.loads or self.to_host or self.from_host or of_states)


class Guess(NamedTuple):
    """Token from the executor's drafter; see Draft (engine/speculative/drafts.py)."""

    token: int
    parent: int
    confidence: float


class ItemResult(msgspec.Struct):
    """A sampled `token`, if any, `input_logprobs` from `logprob_from`, and `drafted` candidates.

    `hidden`: float32 rows from `hidden_from`, or one pooled row.
    """

    token: int | None
    logprob: TokenLogprob | None = None
    input_logprobs: list[TokenLogprob] = []  # each its own: msgspec copies an empty default
    bad: bool = False  # NaN logits
    hidden: bytes = b""
    drafted: list[Guess] = []


@dataclass(slots=True)
class StepResult:
    """Results parallel to `Plan.items`; empty after a `failure`."""

    seq: int
    items: list[ItemResult]
    failure: str = ""
