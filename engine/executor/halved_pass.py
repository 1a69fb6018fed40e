"""A step whose two halves go through the layers in turns."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.core.plan import Plan, PlanItem
from engine.core.two_batches import halves
from engine.executor.layer_marks import LayerMarks
from engine.executor.step_inputs import StepInputs
from engine.executor.two_halves import TwoHalves
from engine.kv.arrival import Arrival
from engine.kv.step_batch import StepBatch
from engine.models.decoder import DenseDecoder
from engine.parallel.exchange import Stages
from engine.parallel.row_exchange import RowExchange

Batch = Callable[
    [Plan, list[PlanItem]], tuple[StepBatch, Tensor, Tensor]
]  # as of ForwardPass: step, positions, token ids


class HalvedPass:
    """`backends`: of each half one, over the same pool. `exchange`: with DP attention."""

    def __init__(
        self,
        backends: Sequence[AttentionBackend],
        *,
        inputs: StepInputs,
        layers: LayerMarks,
        exchange: RowExchange | None,
    ) -> None:
        self._backends = backends
        self._inputs = inputs
        self._layers = layers
        self._exchange = exchange
        self._two = TwoHalves()

    def takes(self, plan: Plan) -> bool:
        """Whether all ranks compute the step in halves."""
        return bool(plan.agreed.cuts) if plan.agreed is not None else plan.cut > 0

    def run(self, model: DenseDecoder, plan: Plan, batch: Batch, arrival: Arrival) -> Tensor:
        """The hidden states [T, hidden] of the items' tokens, if there are some."""
        parts = halves(plan.items, self._cut(plan))
        found = [batch(plan, part) if part else None for part in parts]
        stages = self._stages(model, plan, found, arrival)
        if self._exchange is not None:
            assert plan.agreed is not None
            stages = [
                self._exchange.in_rows(rows, one) for rows, one in zip(_rows_of_halves(plan), stages, strict=True)
            ]
        return torch.cat(self._two.run(stages))

    def close(self) -> None:
        self._two.close()

    def _cut(self, plan: Plan) -> int:
        if plan.agreed is None:
            return plan.cut
        assert self._exchange is not None
        return plan.agreed.cuts[self._exchange.dp_rank]

    def _stages(
        self,
        model: DenseDecoder,
        plan: Plan,
        batches: Sequence[tuple[StepBatch, Tensor, Tensor] | None],
        arrival: Arrival,
    ) -> list[Stages[Any, Tensor]]:
        there = [one for one in batches if one is not None]
        begun: Sequence[Tensor] = ()
        if there:
            ids, positions = torch.cat([one[2] for one in there]), torch.cat([one[1] for one in there])
            begun = model.begin(self._inputs.resolve(ids), positions)
        attends = self._layers.of_parts(plan.seq, [self._begun(i, one) for i, one in enumerate(batches)], arrival)
        stages: list[Stages[Any, Tensor]] = []
        at = 0
        for one, attend in zip(batches, attends, strict=True):
            if one is None or attend is None:
                stages.append(model.join_stages())
                continue
            end = at + len(one[2])
            stages.append(model.stages(tuple(x[at:end] for x in begun), attend))
            at = end
        return stages

    def _begun(self, half: int, batch: tuple[StepBatch, Tensor, Tensor] | None) -> Any:
        """Begin the step of a half; return its attention, or None if it has no rows."""
        if batch is None:
            return None
        self._backends[half].begin(batch[0])
        return self._backends[half].attend


def _rows_of_halves(plan: Plan) -> list[list[int]]:
    """Of each DP rank."""
    assert plan.agreed is not None
    pairs = list(zip(plan.agreed.cuts, plan.agreed.tokens, strict=True))
    return [[cut for cut, _ in pairs], [tokens - cut for cut, tokens in pairs]]
