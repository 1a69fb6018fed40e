"""Steps of DP attention on one rank: rows of each DP rank in the layers computed jointly.

Recorded decode steps have as many rows on each as on the largest: others pad with rows of page 0.
Any other step has the agreed rows. Drafters need no other DP rank.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.core.plan import PlanItem
from engine.executor.step_part import Batch, StepPart
from engine.parallel.row_exchange import RowExchange


class Repeated(Protocol):
    def takes(self, num_rows: int) -> bool: ...


class JointSteps(StepPart):
    """`graphs` pad by themselves, `tapes` do not; there are some on every rank or on none.

    When a tape records steps with drafts depends on a rank's own, so such steps have none.

    `scratch_slot`: whose pages are page 0.
    """

    def __init__(
        self, exchange: RowExchange, *, graphs: Sequence[Repeated], tapes: Sequence[Repeated], scratch_slot: int
    ) -> None:
        self._exchange = exchange
        self._graphs, self._tapes = graphs, tapes
        self._padding = PlanItem(
            rid="",
            slot=scratch_slot,
            tokens=[0],
            start=0,
            page_start=0,
            new_pages=[],
            sample=False,
            output_len=0,
            extend=False,
        )

    def expect(self, batch: Batch) -> None:
        """Expect the rows of a step, and fill its items up where a tape plays it."""
        agreed = batch.plan.agreed
        assert agreed is not None, "a forward that the other DP ranks know nothing of"
        most = max(agreed.tokens)
        by_graph = agreed.graph and any(graphs.takes(most) for graphs in self._graphs)
        by_tape = agreed.graph and not agreed.drafts and any(tapes.takes(most) for tapes in self._tapes)
        batch.recorded = by_graph or by_tape
        if by_graph:
            batch.most = most  # the graph has more rows, and begins the exchange for them
        elif batch.recorded:
            self._exchange.begin_equal(most)
            batch.items = batch.items + [self._padding] * (most - len(batch.items))
        else:
            self._exchange.begin(agreed.tokens)
