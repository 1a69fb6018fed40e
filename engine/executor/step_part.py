"""A step of one rank, its parts, each of a feature, and what computes it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.core.plan import Guess, Plan, PlanItem, SlotOpen
from engine.executor.layer_marks import LayerMarks
from engine.kv.kv_pool import KVPool
from engine.kv.page_copies import Arrival
from engine.kv.step_batch import PageTable, StepBatch, upload
from engine.models.decoder import DenseDecoder
from engine.models.layer import Attend
from engine.models.vision.tower import NO_IMAGES, StepImages

# ---- tokens that the host does not know yet


class StepInputs(Protocol):
    """Inputs of steps: tokens, or a later stage's hidden states.

    Recorded steps reuse memory: `fill` writes it before each replay, `recorded` reads it inside.
    """

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Input for `DenseDecoder.begin` from ids or placeholders [T]."""

    def fill(self, rows: int) -> None:
        """Prepare a replay with `rows` valid rows."""

    def recorded(self, token_ids: Tensor) -> Tensor:
        """`resolve` inside a recorded step, with padding."""


class FutureMap:
    """Last token of each slot on the device, unknown to the host: `last` int64[slots + 1].

    Padding stores in the extra cell. Inputs may contain placeholders -(slot + 1), resolved before
    the forward. FIFO order is the only synchronization. After SGLang's FutureMap.
    """

    def __init__(self, last: Tensor) -> None:
        self._last = last

    @classmethod
    def on(cls, device: torch.device, *, num_slots: int) -> "FutureMap":
        return cls(torch.zeros(num_slots + 1, dtype=torch.int64, device=device))

    def resolve(self, token_ids: Tensor) -> Tensor:
        return torch.where(token_ids < 0, self._last[(-token_ids - 1).clamp_min(0)], token_ids)

    def fill(self, rows: int) -> None: ...

    def recorded(self, token_ids: Tensor) -> Tensor:
        return self.resolve(token_ids)

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """Both int64[n]."""
        self._last[slots] = tokens

    def on_sampled(self) -> None:
        """Share stored tokens, in maps over ranks."""


# ---- rows of hidden states for logits, by call and by request
#
# Ranks that share a vocabulary compute calls together.

PROMPT_LOGPROB_ROWS = 256  # prompt positions with logits at once: [rows, vocab] float32


def first_rows(items: Sequence[PlanItem]) -> list[int]:
    return list(accumulate((item.q_len for item in items), initial=0))


def prompt_parts(item: PlanItem, first_row: int) -> Iterator[tuple[range, list[int]]]:
    """Row ranges for prompt logprobs, and their tokens; row i predicts position i + 1."""
    assert item.logprob_from is not None
    targets = item.tokens[item.logprob_from - item.start :]
    targets += [] if item.logprob_next is None else [item.logprob_next]
    begin = first_row + item.logprob_from - 1 - item.start
    for at in range(0, len(targets), PROMPT_LOGPROB_ROWS):
        part = targets[at : at + PROMPT_LOGPROB_ROWS]
        yield range(begin + at, begin + at + len(part)), part


def sampled_rows(items: Sequence[PlanItem], starts: Sequence[int]) -> list[int]:
    return [starts[i + 1] - 1 for i, item in enumerate(items) if item.sample]


def logit_calls(items: Sequence[PlanItem]) -> Iterator[list[int]]:
    """Rows of every `model.logits` call (engine/executor/passes.py)."""
    starts = first_rows(items)
    for i, item in enumerate(items):
        if item.logprob_from is not None:
            yield from ([*rows] for rows, _ in prompt_parts(item, starts[i]))
    if rows := sampled_rows(items, starts):
        yield rows


def runs_of(items: Sequence[PlanItem]) -> list[list[int]]:
    """Items by request: the known tokens' first, then draft readers."""
    runs: list[list[int]] = []
    for i, item in enumerate(items):
        if item.draft:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


Sampled = tuple[Tensor, Tensor]  # tokens [n] int64, and whether the logits were bad [n] bool


@dataclass(frozen=True, slots=True)
class Forward:
    """The hidden states [T, hidden] of a step's new tokens.

    `gave_logits`: of a recorded step on a rank that samples nothing: the leader has its columns.
    """

    hidden: Tensor
    gave_logits: bool = False

    def rows(self, n: int, *, sampled: bool) -> "Forward":
        return replace(self, hidden=self.hidden[:n])

    def logits(self, model: DenseDecoder, rows: Sequence[int]) -> Tensor:
        """The logits [len(rows), V] float32 of `rows`, ascending."""
        if len(rows) == len(self.hidden):
            return model.logits(self.hidden)
        return model.logits(self.hidden[upload(rows, self.hidden.device)])

    def sampled(self, sample: Callable[[], Sampled]) -> Sampled:
        return sample()


@dataclass(frozen=True, slots=True)
class ForwardWithLogits(Forward):
    """A recorded decode step with the logits [T, V] float32 of all rows; each is sampled."""

    recorded: Tensor = field(kw_only=True)

    def logits(self, model: DenseDecoder, rows: Sequence[int]) -> Tensor:
        return self.recorded


@dataclass(frozen=True, slots=True)
class SampledForward(ForwardWithLogits):
    """A recorded step with `tokens`, which the future map has."""

    tokens: Sampled = field(kw_only=True)

    def rows(self, n: int, *, sampled: bool) -> Forward:
        hidden, logits, (tokens, bad) = self.hidden[:n], self.recorded[:n], self.tokens
        if not sampled:
            return ForwardWithLogits(hidden, recorded=logits)
        return SampledForward(hidden, recorded=logits, tokens=(tokens[:n], bad[:n]))

    def sampled(self, sample: Callable[[], Sampled]) -> Sampled:
        return self.tokens


@dataclass(slots=True)
class StepRows:
    """The new tokens of `items`, item after item.

    `step`: as kernels see it. `ids` [T] int64, some of them placeholders. `positions`: of RoPE, [T]
    int64, or with tokens of images [3, T] (time, row, column). `token_slots`, `places`: [T] int64,
    whose pages a token's KV goes to, and where in them.
    """

    items: list[PlanItem]
    step: StepBatch
    ids: Tensor
    positions: Tensor
    token_slots: Tensor
    places: Tensor


class Followed(NamedTuple):
    """Trace of a drafter in a step's graph: the `features` [T, size] it reads."""

    features: Tensor | None


class Batch:
    """A step of one rank. Its rows are uploaded when something reads them first.

    `items`: of `plan`, and with DP attention padding. `recorded`: whether a recorded decode step
    may compute it, with rows for `most`. `adapted`: some row has an adapter. `images`: what stands
    in for embeddings. `followed`: by a drafter in a graph.
    """

    def __init__(
        self,
        model: DenseDecoder,
        plan: Plan,
        arrivals: Sequence[Arrival],
        *,
        backend: AttentionBackend,
        page_table: PageTable,
        inputs: StepInputs,
        layers: LayerMarks,
        parts: "Sequence[StepPart]",
    ) -> None:
        self.model = model
        self.plan = plan
        self.arrivals = arrivals
        self.layers = layers
        self.items = plan.items
        self.recorded, self.most = not plan.extend, len(plan.items)
        self.adapted = False
        self.images: StepImages = NO_IMAGES
        self.followed: Followed | None = None
        self._backend = backend
        self._page_table = page_table
        self._step_inputs = inputs
        self._parts = parts
        self._resolved: Tensor | None = None

    def hold_all(self) -> None:
        """Order later work after all loads for this step."""
        for arrival in self.arrivals:
            arrival.hold_all()

    def begin(self) -> Attend:
        """Prepare parts and attention for layers that are computed now."""
        for part in self._parts:
            part.begin(self)
        self._backend.begin(self.rows.step)
        return self._backend.attend

    def inputs(self) -> Tensor:
        """The ids without placeholders, or hidden states of the stage before."""
        if self._resolved is None:
            self._resolved = self._step_inputs.resolve(self.rows.ids)
        return self._resolved

    @cached_property
    def rows(self) -> StepRows:
        items, plan, table = self.items, self.plan, self._page_table
        ids = self._ids([t for item in items for t in item.tokens])
        positions = self._ids([p for i in items for p in range(i.start, i.kv_len)])
        slots = self._ids([item.slot for item in items])
        token_slots = slots if not plan.extend else self._ids([item.slot for item in items for _ in range(item.q_len)])
        token_pages, token_offsets = table.locate(token_slots, positions)
        step = StepBatch(
            extend=plan.extend,
            q_lens=[item.q_len for item in items],
            kv_lens=[item.kv_len for item in items],
            page_table=table.rows,
            slots=slots,
            token_pages=token_pages,
            token_offsets=token_offsets,
            riders=[i for i, item in enumerate(items) if not item.extend],
            drafted=frozenset(i for i, item in enumerate(items) if item.draft),
        )
        rows = StepRows(items, step, ids, positions, token_slots, positions)
        for part in self._parts:
            part.fill(rows)
        return rows

    def _ids(self, values: list[int]) -> Tensor:
        return upload(values, self._page_table.device)


class StepPart:
    """A feature in the steps of a rank, by the hooks that it overrides; all run in stream order.

    Their order: `make_parts` (engine/device/feature_parts.py). No hook has fewer than two users.
    """

    def forget(self) -> None: ...

    def attach(self, model: DenseDecoder) -> None: ...

    def open(self, opened: SlotOpen) -> None: ...

    def prepare(self, model: DenseDecoder, plan: Plan) -> None:
        """Do what `plan` holds besides items. Raises torch.OutOfMemoryError."""

    def expect(self, batch: Batch) -> None:
        """Note the step's items, before anything computes them, be it recorded or not."""

    def fill(self, rows: StepRows) -> None:
        """Fill in what layers need of a step's rows, when something reads them first."""

    def begin(self, batch: Batch) -> None:
        """Prepare for layers that are computed now, not replayed."""

    def end(self, batch: Batch, hidden: Tensor) -> None:
        """Keep what is needed of the step. `hidden` [T, hidden]: what layers gave its tokens."""


ReadDrafts = Callable[[], Mapping[int, list[Guess]]]  # by item; to be called when the step has ended


class TokenDrafter(Protocol):
    """The part of a rank's steps that drafts tokens, and follows those that count."""

    def accept(self, items: Sequence[PlanItem], tokens: Tensor | None) -> None:
        """Keep what follows from the last step with drafts.

        `tokens`: sampled, in item order; None on a rank that samples nothing.
        """

    def draft(self, model: DenseDecoder, items: Sequence[PlanItem]) -> ReadDrafts: ...


class PagedPool(NamedTuple):
    """KV of some layers, and its page table."""

    pool: KVPool
    page_table: PageTable


class Recorded(Protocol):
    """Work recorded for some sizes."""

    def forget(self) -> None: ...

    def record(self, model: DenseDecoder) -> None:
        """Record all sizes before the first step. Raises torch.OutOfMemoryError."""


class RecordedSteps(Recorded, Protocol):
    """Recorded steps; others are left to the next that may."""

    def run(self, batch: Batch) -> Forward | None:
        """Compute the step, behind all that it has to wait for; None: it is not one of these."""
