"""The drafter's part of steps: what it keeps of the tokens that a step computes, the tails of pages, and drafts.

What it keeps of token i (K and V of its layers, in the token's own place of the page) is computed from that token and from the
model's hidden state of token i - 1: of the row before in the same step, else from the tail of the page where i - 1 lies.

    tokens      t0 t1 t2 t3 | t4 t5              a step computes t4 and t5: entry 4 reads the first page's tail
    entries     0  h0 h1 h2 | h3 h4              the hidden state that each entry is computed with; of t0: zero
    tails                h3 |    h5              of a page's newest token, drafts that were rejected left out

So a page depends on what stands before it alone, and is shared, copied and handed over as without a drafter; what goes on from it
drafts as well as the engine that wrote it. Rows of rejected drafts are overwritten as the model's are. Source of the shift: the
inputs of MTP (DeepSeek-V3, arXiv:2412.19437) and EAGLE (arXiv:2401.15077) one token later.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.core.plan import PlanItem
from engine.executor.future_map import FutureMap
from engine.executor.logit_rows import first_rows
from engine.executor.runs import runs_of
from engine.kv.kv_pool import KVPool
from engine.kv.page_table import PageTable
from engine.kv.step_batch import StepBatch
from engine.kv.upload import upload
from engine.models.decoder import DenseDecoder
from engine.models.draft_model import DraftModel
from engine.parallel.collectives import Collectives
from engine.sampler.make import TokenSampler


@dataclass(frozen=True, slots=True)
class Drafted:
    """`tokens` of a pass for the items `of`, on the device or the host."""

    of: list[int]
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class _Runs:
    """Rows of a step that read drafts, each behind the known one of its request: a run. Row numbers count in the step.

    `features` [T, size]: what the tails are made of. `rows` and `items`: of each run.
    """

    features: Tensor
    rows: list[list[int]]
    items: list[list[PlanItem]]


class DraftPass:
    """`sampler`: of the rank that samples; None: another one does. `collectives`: of the ranks of the model, if there are several.

    `pool`: of the model's KV and the drafter's; `backend`: of the drafter's. Calls come in stream order.
    """

    def __init__(
        self,
        *,
        pool: KVPool,
        backend: AttentionBackend,
        page_table: PageTable,
        future_map: FutureMap,
        sampler: TokenSampler | None,
        collectives: Collectives | None,
    ) -> None:
        self._tails = pool.tails
        self._backend = backend
        self._page_table = page_table
        self._future_map = future_map
        self._sampler = sampler
        self._collectives = collectives
        self._device = pool.device
        self._runs: _Runs | None = None

    def follow(
        self,
        model: DenseDecoder,
        items: Sequence[PlanItem],
        step: StepBatch,
        ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
    ) -> None:
        """Keep what the drafter needs of a step's tokens, item after item: their `ids` [T], and the model's `hidden` states [T, H].

        Tails of requests with drafts wait for `accept`.
        """
        drafter, starts = _drafter(model), first_rows(items)
        features = drafter.features(hidden)
        before = None if features is None else self._before(items, starts, features)
        self._backend.begin(step)
        drafter.forward(ids, before, positions, self._backend.attend)
        self._runs = None
        if features is None:
            return
        runs = runs_of(items)
        self._keep_tails([run for run in runs if len(run) == 1], starts, items, features)
        if drafted := [run for run in runs if len(run) > 1]:
            rows = [[starts[i] for i in run] for run in drafted]
            self._runs = _Runs(features, rows, [[items[i] for i in run] for run in drafted])

    def accept(self, items: Sequence[PlanItem], tokens: Tensor | None) -> None:
        """Note which rows of the step that was followed last sampled the next one's draft, and keep their tails.

        `tokens`: sampled by the items that sample, in their order; None on a rank that samples nothing.
        """
        runs, self._runs = self._runs, None
        if runs is None:
            return
        right = self._right(items, runs, tokens)
        most = right.shape[1] + 1
        rows = [run + run[:1] * (most - len(run)) for run in runs.rows]
        ends = [
            [item.kv_len % self._page_size == 0 for item in run] + [False] * (most - len(run)) for run in runs.items
        ]
        last = right.cumprod(1).sum(1, keepdim=True)  # of each run, the number of its last row that counts
        number = torch.arange(most, device=self._device)
        counts = (number == last) | ((number < last) & upload(torch.tensor(ends), self._device))
        at = upload(torch.tensor(rows), self._device)
        slots = self._ids([run[0].slot for run in runs.items])[:, None].expand(-1, most)
        positions = self._ids([run[0].start for run in runs.items])[:, None] + number
        reached = torch.where(counts, positions, 0)
        pages, _ = self._page_table.locate(slots.reshape(-1), reached.reshape(-1))
        self._write(torch.where(counts.reshape(-1), pages, 0), runs.features[at.reshape(-1)])

    def _right(self, items: Sequence[PlanItem], runs: _Runs, tokens: Tensor | None) -> Tensor:
        """[runs, most drafts] int64: 1 where a row's draft is what the row before it sampled."""
        most = max(len(run) for run in runs.rows) - 1
        number, sampled = {}, [i for i, item in enumerate(items) if item.sample]
        for at, i in enumerate(sampled):
            number[id(items[i])] = at
        drafts = [[item.tokens[0] for item in run[1:]] + [-1] * (most + 1 - len(run)) for run in runs.items]
        before = [[number[id(item)] for item in run[:-1]] + [0] * (most + 1 - len(run)) for run in runs.items]
        if tokens is None:
            right = torch.zeros(len(drafts), most, device=self._device)
        else:
            guessed, at = upload(torch.tensor([drafts, before]), self._device)
            right = (tokens.to(self._device)[at] == guessed).float()
        if self._collectives is not None:
            right = self._collectives.sum(right, dtype=torch.float32)
        return right.to(torch.int64)

    def draft(self, model: DenseDecoder, items: Sequence[PlanItem]) -> list[Drafted]:
        """Draft `to_draft` tokens behind each of `items`, whose last known token no step has computed yet.

        With the seeds and parameters of the requests, as the model will sample: so drafts are often right at any temperature.
        """
        drafter, of = _drafter(model), list(range(len(items)))
        slots, starts = self._ids([item.slot for item in items]), self._ids([item.start for item in items])
        ids, hidden = self._ids([item.tokens[0] for item in items]), self._tail_before(slots, starts)
        found = list[Drafted]()
        for number in range(max(item.to_draft for item in items)):
            if len(left := [n for n, i in enumerate(of) if items[i].to_draft > number]) < len(of):
                chosen, of = self._ids(left), [of[n] for n in left]
                slots, starts, ids = slots[chosen], starts[chosen], ids[chosen]
                hidden = None if hidden is None else hidden[chosen]
            positions = starts + number
            self._backend.begin(self._step([items[i] for i in of], slots, positions, number))
            out = drafter.forward(ids, hidden, positions, self._backend.attend)
            ids = self._sampled(drafter, out, [items[i] for i in of], slots, number)
            hidden = None if hidden is None else out
            found.append(Drafted(list(of), ids))
        return found

    def _step(self, items: Sequence[PlanItem], slots: Tensor, positions: Tensor, number: int) -> StepBatch:
        pages, offsets = self._page_table.locate(slots, positions)
        return StepBatch(
            extend=False,
            q_lens=[1] * len(items),
            kv_lens=[item.kv_len + number for item in items],
            page_table=self._page_table.rows,
            slots=slots,
            token_pages=pages,
            token_offsets=offsets,
        )

    def _sampled(
        self, drafter: DraftModel, out: Tensor, items: Sequence[PlanItem], slots: Tensor, number: int
    ) -> Tensor:
        """The tokens that the rows of `out` say, on all ranks."""
        logits = drafter.logits(out)
        if self._sampler is not None:
            assert logits is not None, "the rank that samples has all logits"
            lens = [item.output_len + number for item in items]
            tokens = self._sampler.guess(logits, [item.slot for item in items], lens)
            self._future_map.store(slots, tokens)
        self._future_map.on_sampled()
        return self._future_map.resolve(-slots - 1)

    def _before(self, items: Sequence[PlanItem], starts: Sequence[int], features: Tensor) -> Tensor:
        """[T, size]: of each row, the features of the token before it."""
        firsts = [i for i, item in enumerate(items) if not item.draft]
        slots, positions = (self._ids([getattr(items[i], name) for i in firsts]) for name in ("slot", "start"))
        before = features.roll(1, 0)
        tails = self._tail_before(slots, positions)
        assert tails is not None
        return before.index_copy_(0, self._ids([starts[i] for i in firsts]), tails)

    def _tail_before(self, slots: Tensor, positions: Tensor) -> Tensor | None:
        """[n, size]: what the tails say of the tokens before `positions`; of the first one: zero. None: the drafter reads none."""
        if self._tails is None:
            return None
        pages, _ = self._page_table.locate(slots, (positions - 1).clamp_min(0))
        return self._tails[pages, 0].masked_fill((positions == 0)[:, None], 0)

    def _keep_tails(
        self, runs: Sequence[Sequence[int]], starts: Sequence[int], items: Sequence[PlanItem], features: Tensor
    ) -> None:
        """Of requests whose rows all count: the last token of each page that their rows touch."""
        found = [(item, at) for (i,) in runs for item in [items[i]] for at in self._page_ends(item)]
        if not found:
            return
        first = {id(items[i]): starts[i] for (i,) in runs}
        slots, positions = self._ids([item.slot for item, _ in found]), self._ids([at for _, at in found])
        pages, _ = self._page_table.locate(slots, positions)
        self._write(pages, features[self._ids([first[id(item)] + at - item.start for item, at in found])])

    def _page_ends(self, item: PlanItem) -> list[int]:
        size = self._page_size
        whole = range(item.start // size * size + size - 1, item.kv_len - 1, size)
        return [*whole, item.kv_len - 1]

    def _write(self, pages: Tensor, rows: Tensor) -> None:
        assert self._tails is not None
        self._tails[pages] = rows[:, None].to(self._tails.dtype)

    @property
    def _page_size(self) -> int:
        return self._page_table.page_size

    def _ids(self, values: list[int]) -> Tensor:
        return upload(torch.tensor(values), self._device)


def _drafter(model: DenseDecoder) -> DraftModel:
    assert model.drafter is not None, "the model was loaded without its drafter"
    return model.drafter
