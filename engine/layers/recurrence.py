"""Recurrent states in a step: rows by request, states by layer."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.state_rows import StateRows
from engine.kv.state_pool import StatePool
from engine.kv.upload import upload
from engine.layers.chunks import Chunk, in_chunks


class RequestRows(NamedTuple):
    """Rows `first`.. `end` of a request. `decodes`: one answer token, with drafts several."""

    first: int
    end: int
    decodes: bool


class LayerStates(NamedTuple):
    """One layer's [slots, channels, taps - 1] and [slots, *shape] fp32, scratch included."""

    conv: Tensor
    recurrent: Tensor


class StepStates:
    """Shared by all recurrent layers; call `begin` before each step.

    `keeps`: with drafts, layers keep `products`, their first product of all rows.
    """

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self.rows = StateRows(pool) if pool.device.type == "cpu" else None  # for C kernels
        self.spans: Sequence[RequestRows] = ()
        self.slots = torch.zeros(0, dtype=torch.int64, device=pool.device)
        self.keeps = False
        self.products: dict[int, Tensor] = {}

    def begin(self) -> None:
        step = self._pool.step
        assert step is not None and step.state_slots is not None, "the pool knows its step"
        riders = {*(step.riders or ())} if step.extend else {*range(len(step.q_lens))}
        lens, slots, decodes = step.q_lens, step.state_slots, [i in riders for i in range(len(step.q_lens))]
        self.keeps = step.drafts
        if step.drafts:  # rows of one request must not race for its state
            first, *rest = step.first_rows()
            starts = [first, *rest[:-1]]
            lens = [sum(lens[a:b]) for a, b in zip(starts, rest, strict=True)]
            slots, decodes = slots[upload(torch.tensor(starts), slots.device)], [decodes[i] for i in starts]
        self._lay(lens, slots, decodes)

    def begin_again(self, counts: Sequence[int], slots: Tensor) -> None:
        """Start a rerun with `counts` decode rows per request, states in `slots` [n] i32."""
        self._lay(counts, slots, [True] * len(counts))

    def _lay(self, lens: Sequence[int], slots: Tensor, decodes: Sequence[bool]) -> None:
        if self.rows is not None:
            self.rows.begin(lens, slots)
        ends = list(accumulate(lens))
        self.spans = [RequestRows(end - n, end, one) for end, n, one in zip(ends, lens, decodes, strict=True)]
        self.slots = slots.to(torch.int64)

    def keep(self) -> Callable[[], object]:
        return self._pool.keep(self.slots)

    def of(self, layer: int) -> LayerStates:
        return LayerStates(self._pool.conv(layer), self._pool.recurrent(layer))


def recur(rule: tuple[Tensor, ...], state: Tensor, step: StepStates, *, one: Chunk, chunk: Chunk) -> Tensor:
    """Outputs [T, heads, values] of a step, in torch; updates `state` [slots, heads, keys, values].

    `rule`: [T, heads, ...] fp32 each. `one` takes a decode token, `chunk` `GRID` prompt tokens.
    """
    heads, _, values = state.shape[1:]
    outputs = torch.empty(len(rule[0]), heads, values, device=state.device)
    for (first, end, decodes), slot in zip(step.spans, step.slots, strict=True):
        rows, before = tuple(x[first:end] for x in rule), state[slot]
        outputs[first:end], state[slot] = _in_turn(rows, before, one) if decodes else in_chunks(rows, before, chunk)
    return outputs


def _in_turn(rows: tuple[Tensor, ...], state: Tensor, one: Chunk) -> tuple[Tensor, Tensor]:
    outputs = []
    for i in range(len(rows[0])):
        output, state = one(tuple(x[i : i + 1] for x in rows), state)
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state
