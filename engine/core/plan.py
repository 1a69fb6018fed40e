"""One step as the scheduler plans it, and its result. Plain data: no torch, no I/O.

A `Plan` is all the executor needs; it never looks at a request.
"""

from dataclasses import dataclass, field

import msgspec

from engine.messages import LogprobOptions, TokenLogprob
from engine.sampling_params import SamplingParams

PAD_PAGE = 0  # page 0 is scratch: padding writes go there; real pages are 1..num_pages


@dataclass(slots=True, frozen=True)
class SlotOpen:
    """A request has got a row of the request table: the executor's state of the slot.

    `prompt_ids` and `output_ids` (tokens already generated, after a retraction or a hand-over) feed the penalties.
    `adapter`: number of the LoRA adapter that computes it; 0: the model alone.
    """

    slot: int
    sampling: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    eos_ids: tuple[int, ...]
    adapter: int = 0


class PlanItem(msgspec.Struct, frozen=True):
    """One request's part of a step. (A struct: one is made for every request and step, and a frozen dataclass costs 1 us.)

    tokens:      [q_len] token ids at positions start .. start+q_len-1; a negative id -(slot+1) is a placeholder for
                 the token that slot `slot` sampled last (it may not exist on the host yet).
    start:       tokens whose KV is already in the pages (cached prefix or earlier chunks)
    page_start:  `new_pages` go to this index of the slot's page row
    sample:      sample a token after the last position (False for a chunk that is not the last)
    output_len:  output tokens before this step: the position of the sample (seeds, min_new_tokens)
    extend:      part of a prompt (or of what a retracted request has to compute again), not the next token
    logprob_from: first position (prompt index) whose own logprob is wanted in this step, or None
    hidden_from: first position whose hidden state is wanted in this step, or None
    pool:        "last" | "mean": instead, one vector of these positions: the last state, or their sum
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

    @property
    def q_len(self) -> int:
        return len(self.tokens)

    @property
    def kv_len(self) -> int:
        """Tokens in the KV cache after this step."""
        return self.start + len(self.tokens)


@dataclass(slots=True, frozen=True)
class PageSave:
    """Copy `pages` to host memory under `key`."""

    key: int
    pages: list[int]


@dataclass(slots=True, frozen=True)
class PageLoad:
    """Copy pages `start`.. of copy `key` into `pages`, and forget the copy."""

    key: int
    start: int
    pages: list[int]


@dataclass(slots=True, frozen=True)
class PageCopy:
    """Between a device page and a page of the host tier."""

    page: int
    host_page: int


@dataclass(slots=True)
class Plan:
    """One step. `extend`: some item is part of a prompt (q_len of any size); decodes may ride along.

    `wait`: the loop collects every launched step before it launches this one (depth 1).

    `masks`: by item index, the tokens that item may sample (`Grammar.bitmask`); filled in just before sampling is launched.
    `sample_deferred`: some masks follow from tokens in flight: the forward may be launched now, sampling when they are collected.

    Order the executor owes: `to_host`, `from_host`, `drops` (copies to forget), `saves`, `loads`, then `closes`, then
    `opens`, then page rows of `items`, then forward, then sampling. A plan may have no items: then there is nothing to
    compute.
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
    sample_deferred: bool = False


class ItemResult(msgspec.Struct):
    """`token`: sampled id (None when `sample` was False). `input_logprobs`: for positions from `logprob_from`.

    `hidden`: float32 rows, one for each position from `hidden_from`, or one when they are pooled.
    """

    token: int | None
    logprob: TokenLogprob | None = None
    input_logprobs: list[TokenLogprob] = []  # each its own: msgspec copies an empty default
    bad: bool = False  # NaN logits
    hidden: bytes = b""


@dataclass(slots=True)
class StepResult:
    """Parallel to `Plan.items`."""

    seq: int
    items: list[ItemResult]
