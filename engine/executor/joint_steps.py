"""Steps of DP attention on one rank: rows of each DP rank in the layers computed jointly.

A decode step that all ranks replay from tapes has the maximum number of rows on each: others pad
with rows of page 0, whose results are unused. Any other step has the agreed rows.
"""

from collections.abc import Sequence

from engine.core.plan import PlanItem
from engine.executor.decode_tapes import DecodeTapes
from engine.executor.step_part import Batch, StepPart
from engine.parallel.row_exchange import RowExchange


class JointSteps(StepPart):
    """`tapes`: there are some on every rank or on none. `scratch_slot`: whose pages are page 0."""

    def __init__(self, exchange: RowExchange, *, tapes: Sequence[DecodeTapes], scratch_slot: int) -> None:
        self._exchange = exchange
        self._tapes = tapes
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
        """Expect the rows of a step, and fill its items up where it is replayed."""
        agreed = batch.plan.agreed
        assert agreed is not None, "a forward that the other DP ranks know nothing of"
        most = max(agreed.tokens)
        batch.tapes = agreed.graph and any(tapes.takes(most) for tapes in self._tapes)
        if not batch.tapes:
            self._exchange.begin(agreed.tokens)
            return
        self._exchange.begin([most] * len(agreed.tokens))
        batch.items = batch.items + [self._padding] * (most - len(batch.items))
