"""Passes of a drafter, and what follows from verified rows, as graphs.

A step that drafts is one graph. Requests of fewer passes, and padding, go on in the scratch row:
page 0, unsampled. Accepting is another graph, over copies of sampled tokens and features. Known
tokens are followed in the step's own graph (engine/executor/graphs.py).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.plan import PlanItem
from engine.executor.graphs import GraphRecorder
from engine.kv.step_batch import to_host, upload, upload_into
from engine.models.decoder import DenseDecoder
from engine.models.draft_model import DraftModel
from engine.sampler.sampler import NOT_SAMPLED
from engine.speculative.accepted_kv import AcceptedKV
from engine.speculative.draft_rows import VerifiedRows, verified_rows
from engine.speculative.draft_steps import (
    DeviceLengths,
    Drafted,
    DraftParts,
    KnownRows,
    Passes,
    columns_of,
    known_rows,
)

EACH_COUNT = 4  # passes with a graph of their own; more take the next power of two


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Ascending sizes of graphs: `requests` that draft, `rows` that are verified.

    `passes` and `topk`: most. `request_rows`: most verified rows of a request.
    """

    requests: Sequence[int]
    rows: Sequence[int]
    passes: int
    topk: int
    request_rows: int

    @property
    def widths(self) -> list[int]:
        """Candidates per place: drafts may be chains or trees."""
        return sorted({1, self.topk})

    @property
    def counts(self) -> list[int]:
        counts, powers = range(1, 1 + EACH_COUNT), (1 << n for n in range(self.passes.bit_length()))
        return sorted({n for n in (*counts, *powers) if n < self.passes} | {self.passes})

    @property
    def num_graphs(self) -> int:
        return len(self.requests) * len(self.widths) * len(self.counts) + len(self.rows)


class DraftRecording(NamedTuple):
    recorder: GraphRecorder
    sizes: DraftSizes


class PassGraphs:
    """Steps that draft, by requests, candidates and passes."""

    def __init__(self, parts: DraftParts, passes: Passes, recording: DraftRecording) -> None:
        self._parts, self._passes, (self._recorder, self._sizes) = parts, passes, recording
        self._page_table = parts.pools[0].page_table
        device = self._page_table.device
        self._inputs = {size: upload(self._rows([], size), device) for size in self._sizes.requests}
        self._graphs: dict[tuple[int, int, int], Callable[[], Tensor]] = {}

    def forget(self) -> None:
        self._graphs = {}

    def record(self, model: DenseDecoder) -> None:
        self.forget()
        assert model.drafter is not None, "the model was loaded without its drafter"
        graphs, capture = {}, self._recorder.capture()
        for size in self._recorder.bar(self._sizes.requests, "draft graphs"):
            upload_into(self._inputs[size], self._rows([], size))
            for topk in self._sizes.widths[::-1]:
                for count in self._sizes.counts[::-1]:
                    graphs[size, topk, count] = capture.capture(self._work(model.drafter, size, topk, count))
        self._graphs = graphs

    def run(self, items: Sequence[PlanItem]) -> list[Drafted] | None:
        """None: there is no graph."""
        seen = any(item.images is not None and item.images.rope is not None for item in items)
        sizes, counts, topk = self._sizes.requests, self._sizes.counts, items[0].topk
        if not self._graphs or seen or len(items) > sizes[-1]:
            return None
        size = sizes[bisect_left(sizes, len(items))]
        most = max(item.to_draft for item in items)
        self._recorder.inputs.fill(len(items))
        upload_into(self._inputs[size], self._rows(items, size))
        table = to_host(self._graphs[size, topk, counts[bisect_left(counts, most)]]()[: len(items)])
        widths = [1, *[topk] * (most - 1)]
        columns = [columns_of(width, topk) for width in widths]
        tables = torch.split(table[:, : sum(columns)], columns, 1)
        return [
            Drafted([i if item.to_draft > number else -1 for i, item in enumerate(items)], own, width, topk)
            for number, (own, width) in enumerate(zip(tables, widths, strict=True))
        ]

    def _rows(self, items: Sequence[PlanItem], size: int) -> Tensor:
        """Host int64 [7, size] as of KnownRows."""
        padding = 0, self._page_table.scratch_slot, 0, 0, NOT_SAMPLED, 0, 0
        return torch.tensor(known_rows(items) + [padding] * (size - len(items))).T.contiguous()

    def _work(self, drafter: DraftModel, size: int, topk: int, count: int) -> Callable[[], Tensor]:
        rows, scratch = KnownRows(*self._inputs[size]), self._page_table.scratch_slot

        def work() -> Tensor:
            known, tables = self._passes.known(rows, topk=topk), []
            paths = known
            for number in range(count):
                goes_on = rows.passes > number
                if number:
                    slots = torch.where(goes_on, known.slots, scratch)
                    starts, turns = (torch.where(goes_on, x, 0) for x in (known.starts, known.turns))
                    paths = replace(paths, slots=slots, starts=starts, turns=turns)
                output_lens = torch.where(goes_on, known.output_lens + number, NOT_SAMPLED)
                lengths = DeviceLengths(self._parts, paths, output_lens)
                table, paths = self._passes.run(drafter, paths, number, lengths)
                tables.append(table)
            return torch.cat(tables, 1)

        return work


class AcceptGraphs:
    """`accept` of DraftPass, by rows, which all sample."""

    def __init__(self, parts: DraftParts, kv: AcceptedKV, recording: DraftRecording) -> None:
        (pool, self._page_table), self._kv, (self._recorder, self._sizes) = parts.pools[0], kv, recording
        self._samples = parts.sampler is not None
        device, most, tails = self._page_table.device, self._sizes.rows[-1], pool.tails
        self._inputs = {size: upload(self._rows([], size), device) for size in self._sizes.rows}
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._features = None if tails is None else tails.new_zeros(most, tails.shape[2])
        self._graphs: dict[int, Callable[[], None]] = {}

    def forget(self) -> None:
        self._graphs = {}

    def record(self, model: DenseDecoder) -> None:
        self.forget()
        if not self._kv.is_needed and self._sizes.topk == 1:
            return
        graphs, capture = {}, self._recorder.capture()
        for size in self._recorder.bar(self._sizes.rows, "accept graphs"):
            upload_into(self._inputs[size], self._rows([], size))
            graphs[size] = capture.capture(self._work(size))
        self._graphs = graphs

    def run(self, items: Sequence[PlanItem], tokens: Tensor | None, features: Tensor | None) -> bool:
        """False: the step has no graph."""
        sizes, count = self._sizes.rows, len(items)
        one_each = all(item.sample and item.q_len == 1 for item in items)
        if not self._graphs or not one_each or count > sizes[-1]:
            return False
        size = sizes[bisect_left(sizes, count)]
        upload_into(self._inputs[size], self._rows(items, size))
        if tokens is not None:
            self._tokens[:count].copy_(tokens)
        if features is not None and self._features is not None:
            self._features[:count].copy_(features)
        self._graphs[size]()
        return True

    def _rows(self, items: Sequence[PlanItem], size: int) -> Tensor:
        """Host int64 [6, size] as of VerifiedRows."""
        scratch, count = self._page_table.scratch_slot, len(items)
        padding = [(i, 0, scratch, 0, -1, 0) for i in range(count, size)]
        return torch.tensor(verified_rows(items, self._page_table.page_size) + padding).T.contiguous()

    def _work(self, size: int) -> Callable[[], None]:
        rows, sizes = VerifiedRows(*self._inputs[size]), self._sizes
        features = None if self._features is None else self._features[:size]

        def work() -> None:
            sampled = self._tokens[:size] if self._samples else None
            self._kv.keep(rows, sampled, features, deepest=sizes.request_rows, trees=sizes.topk > 1)

        return work
