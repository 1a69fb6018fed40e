"""Decode steps on a CPU as tapes (engine/kernels/tape.py), recorded once per batch size.

A tape holds calls of C kernels only. As a check, the first two steps of a size also run without the
tape; a size whose second step gives other bits has none. Sizes of steps with drafts are recorded
after `OFTEN` steps.
"""

import logging
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.executor.step_part import Batch, Forward
from engine.kernels.tape import Tape, Workspace
from engine.models.decoder import Begun, DenseDecoder
from engine.models.layer import Attend

MAX_ROWS = 64  # of larger batches Python's share is small
OFTEN = 8  # steps of a size: its tape takes two steps more

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Recorded:
    """A recorded step. `begun`: its inputs. `is_checked`: it gave the model's own bits.

    `products`: kept by recurrent layers for steps with drafts, by layer.
    """

    tape: Tape
    begun: Begun
    hidden: Tensor
    products: dict[int, Tensor]
    is_checked: bool = False

    def play(self, model: DenseDecoder, begun: Begun) -> Tensor:
        for mine, now in zip(self.begun, begun, strict=True):
            mine.copy_(now)
        self.tape.play()
        if self.products:
            for states in model.states:
                states.products = dict(self.products)
        return self.hidden.clone()  # the memory is the next step's


class DecodeTapes:
    """Tapes of one model at a time, for one thread. None marks a size that cannot be recorded.

    `shared_by`: DP ranks that compute layers for the rows of all, with DP attention.
    """

    def __init__(self, *, shared_by: int = 1) -> None:
        self._workspace = Workspace(MAX_ROWS * shared_by)
        self._tapes: dict[tuple[int, bool], _Recorded | None] = {}  # by size, and whether products stay
        self._seen: Counter[int] = Counter()  # steps with drafts, by size

    def forget(self) -> None:
        self._tapes = {}

    def record(self, model: DenseDecoder) -> None:
        """Wait for the first steps: each records its size."""

    def run(self, batch: Batch) -> Forward | None:
        """Compute a decode step. Tapes know no adapters, and mark no layers."""
        if not batch.recorded or batch.adapted or batch.layers.watched or not self.takes(len(batch.items)):
            return None
        attend, rows = batch.begin(), batch.rows
        inputs = batch.inputs()
        batch.hold_all()
        return Forward(self.forward(batch.model, inputs, rows.positions, attend, drafts=rows.step.drafts))

    def takes(self, num_rows: int) -> bool:
        return num_rows <= MAX_ROWS

    def forward(
        self, model: DenseDecoder, input_ids: Tensor, positions: Tensor, attend: Attend, *, drafts: bool = False
    ) -> Tensor:
        """`model.forward` of a step that `takes` accepted and the attention backend has begun."""
        begun, size = model.begin(input_ids, positions), len(input_ids)
        kind = size, bool(model.states) and drafts
        if drafts and kind not in self._tapes:
            self._seen[size] += 1
            if self._seen[size] < OFTEN:
                return model.layers(begun, attend)
        if kind not in self._tapes:
            put_back = model.keep_states()
            self._tapes[kind] = self._record(model, begun, attend)
            put_back()
            return model.layers(begun, attend)
        recorded = self._tapes[kind]
        if recorded is None:
            return model.layers(begun, attend)
        if recorded.is_checked:
            return recorded.play(model, begun)
        put_back = model.keep_states()
        played = [recorded.play(model, begun), *(product.clone() for product in _kept(model).values())]
        put_back()
        return self._compare(kind, recorded, played, [model.layers(begun, attend), *_kept(model).values()])

    def _record(self, model: DenseDecoder, begun: Begun, attend: Attend) -> _Recorded:
        own = tuple(x.clone() for x in begun)
        tape = Tape(self._workspace)
        with tape.recording():
            hidden = model.layers(own, attend)
        return _Recorded(tape, own, hidden, _kept(model))

    def _compare(
        self, kind: tuple[int, bool], recorded: _Recorded, played: list[Tensor], computed: list[Tensor]
    ) -> Tensor:
        """Return the hidden states computed without the tape; drop a tape with other bits.

        Their KV was written last. `played`, `computed`: hidden states, then kept products.
        """
        pairs = zip(played, computed, strict=True)
        recorded.is_checked = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
        if not recorded.is_checked:
            self._tapes[kind] = None
            log.warning("decode steps of %d rows run without a tape: it does not give the same bits", kind[0])
        return computed[0]


def _kept(model: DenseDecoder) -> dict[int, Tensor]:
    return {layer: kept for states in model.states if states.keeps for layer, kept in states.products.items()}
