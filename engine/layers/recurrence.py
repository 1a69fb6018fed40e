"""The states of recurrent layers as these see them in a step: whose rows are whose, and each layer's memory."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.state_rows import StateRows
from engine.kv.state_pool import StatePool
from engine.layers.chunks import Chunk, in_chunks


class RequestRows(NamedTuple):
    """Rows `first`.. `end` of a step are one request's. `decodes`: it is one token of an answer."""

    first: int
    end: int
    decodes: bool


class LayerStates(NamedTuple):
    """[1 + slots, channels, taps - 1] and [1 + slots, *shape] fp32: of one layer, a row for each slot."""

    conv: Tensor
    recurrent: Tensor


class StepStates:
    """All recurrent layers of a model share one. `begin` comes before the layers of a step."""

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self.rows = StateRows(pool) if pool.device.type == "cpu" else None  # what C kernels read
        self.spans: Sequence[RequestRows] = ()
        self.slots = torch.zeros(0, dtype=torch.int64, device=pool.device)

    def begin(self) -> None:
        step = self._pool.step
        assert step is not None and step.state_slots is not None, "the pool knows its step"
        if self.rows is not None:
            self.rows.begin(step)
        riders = {*(step.riders or ())} if step.extend else {*range(len(step.q_lens))}
        self.spans = [RequestRows(first, end, i in riders) for i, (first, end) in enumerate(step.spans())]
        self.slots = step.state_slots.to(torch.int64)

    def keep(self) -> Callable[[], object]:
        """Copy the states of the step's requests; the call that is returned puts them back."""
        return self._pool.keep(self.slots)

    def of(self, layer: int) -> LayerStates:
        return LayerStates(self._pool.conv(layer), self._pool.recurrent(layer))


def recur(rule: tuple[Tensor, ...], state: Tensor, step: StepStates, *, one: Chunk, chunk: Chunk) -> Tensor:
    """The outputs [T, heads, values] of a step's rows, in torch; `state` [slots, heads, keys, values] becomes that behind them.

    `rule`: [T, heads, ...] fp32 each. `one` takes the token of a request that decodes, `chunk` `GRID` tokens of a prompt.
    """
    heads, _, values = state.shape[1:]
    outputs = torch.empty(len(rule[0]), heads, values, device=state.device)
    for (first, end, decodes), slot in zip(step.spans, step.slots, strict=True):
        rows, before = tuple(x[first:end] for x in rule), state[slot]
        outputs[first:end], state[slot] = one(rows, before) if decodes else in_chunks(rows, before, chunk)
    return outputs
