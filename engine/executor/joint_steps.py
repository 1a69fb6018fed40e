"""Steps of DP attention on one rank: how many rows each DP rank brings to the layers that all compute together.

A decode step that all ranks replay from tapes has as many rows on each, the most that one has: the others fill theirs up with rows of
page 0, whose results nothing reads. Any other step has the rows that were agreed on.
"""

from engine.core.dp_step import AgreedStep
from engine.core.plan import PlanItem
from engine.executor.decode_tapes import DecodeTapes
from engine.parallel.row_exchange import RowExchange


class JointSteps:
    """`tapes`: None on every rank or on none. `scratch_slot`: whose pages are page 0."""

    def __init__(self, exchange: RowExchange, *, tapes: DecodeTapes | None, scratch_slot: int) -> None:
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

    def replays(self, agreed: AgreedStep) -> bool:
        """Whether all ranks play a tape of this step, or record it."""
        return agreed.graph and self._tapes is not None and self._tapes.takes(max(agreed.tokens))

    def begin(self, agreed: AgreedStep, items: list[PlanItem]) -> list[PlanItem]:
        """Expect the rows of a step; return `items`, filled up where it is replayed."""
        if not self.replays(agreed):
            self._exchange.begin(agreed.tokens)
            return items
        most = max(agreed.tokens)
        self._exchange.begin([most] * len(agreed.tokens))
        return items + [self._padding] * (most - len(items))
