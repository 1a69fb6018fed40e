"""Recurrent state memory and layout: one allocation, slot-major.

  base ->  | slot 0 (scratch) | slot 1 | ... | slot num_slots | shadow 0 | ... |   slot_bytes apart
  slot ->  | layer 0 conv [channels, kernel - 1] | layer 0 recurrent, float32 | layer 1 ... | pad |

A slot transfers as one piece. State checkpoints (`shadow`), for draft verification
(engine/executor/states.py), are in no request or transfer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from engine.core.plan import StateCopy
from engine.kv.cache_spec import StateShard, align
from engine.kv.kv_pool import DTYPES, zeroed_bytes
from engine.kv.step_batch import DeviceStep, StepBatch

SLOT_ALIGN_BYTES = 64
STATE = torch.float32


@dataclass(frozen=True, slots=True)
class StateSpec:
    """State of a recurrent layer: last conv inputs (channels, kernel - 1), float32 `recurrent`.

    `held`: the part of the model's state, by default all.
    """

    conv: tuple[int, int]
    recurrent: tuple[int, ...]
    dtype: str
    held: StateShard | None = None

    @property
    def conv_bytes(self) -> int:
        return prod(self.conv) * DTYPES[self.dtype].itemsize

    @property
    def recurrent_bytes(self) -> int:
        return prod(self.recurrent) * STATE.itemsize

    @property
    def part(self) -> StateShard:
        channels, heads = self.conv[0], self.recurrent[0]
        return self.held or StateShard((range(channels),), channels, range(heads), heads)

    @property
    def channel_bytes(self) -> int:
        return self.conv_bytes // self.conv[0]

    @property
    def head_bytes(self) -> int:
        return self.recurrent_bytes // self.recurrent[0]

    @property
    def whole_bytes(self) -> int:
        return self.part.num_channels * self.channel_bytes + self.part.num_heads * self.head_bytes


class StatePool:
    """Slots 1..num_slots with `specs` per layer, then checkpoints; slot 0 is scratch for padding.

    `step`: rows of the current step; its `state_slots` index `conv` and `recurrent`.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        *,
        num_slots: int,
        num_shadows: int = 0,
        device: str | torch.device,
    ) -> None:
        assert specs and num_slots >= 1, (specs, num_slots)
        self.specs = tuple(specs)
        self.num_slots = num_slots
        self.num_shadows = num_shadows
        self.device = torch.device(device)
        self.slot_bytes = self.slot_bytes_of(specs)
        self._num_rows = 1 + num_slots + num_shadows
        self.buffer = zeroed_bytes(self._num_rows * self.slot_bytes, self.device)
        self.step: StepBatch | DeviceStep | None = None
        self.base_ptr = self.buffer.data_ptr()
        self._rows = self.buffer.view(self._num_rows, self.slot_bytes)
        self.slots = self._rows[: 1 + num_slots]  # [1 + num_slots, slot_bytes]
        offsets = _offsets(specs)
        self._conv = [
            self._view(at, spec.conv, DTYPES[spec.dtype]) for spec, (at, _) in zip(specs, offsets, strict=True)
        ]
        self._recurrent = [self._view(at, spec.recurrent, STATE) for spec, (_, at) in zip(specs, offsets, strict=True)]

    @staticmethod
    def slot_bytes_of(specs: Sequence[StateSpec]) -> int:
        return align(_offsets(specs)[-1][1] + specs[-1].recurrent_bytes, SLOT_ALIGN_BYTES)

    def shadow(self, number: int) -> int:
        assert number < self.num_shadows, (number, self.num_shadows)
        return 1 + self.num_slots + number

    def conv(self, layer: int) -> Tensor:
        """View [1 + num_slots + num_shadows, channels, kernel - 1], newest input last."""
        return self._conv[layer]

    def recurrent(self, layer: int) -> Tensor:
        """View float32 [1 + num_slots + num_shadows, *shape]."""
        return self._recurrent[layer]

    def run(self, copies: Sequence[StateCopy]) -> None:
        """Copy or zero in order: a later copy may overwrite an earlier source."""
        for copy in copies:
            if copy.src is None:
                self._rows[copy.dst].zero_()
            else:
                self._rows[copy.dst].copy_(self._rows[copy.src])

    def runs(self, layers: range) -> list[tuple[int, int, int]]:
        """Return (byte of the model's state, byte of a slot, bytes) per range."""
        assert len(layers) == len(self.specs), (layers, len(self.specs))
        found = []
        for layer, spec, (conv, recurrent) in zip(layers, self.specs, _offsets(self.specs), strict=True):
            begin, part = layer * spec.whole_bytes, spec.part
            for channels in part.channels:
                size = len(channels) * spec.channel_bytes
                found.append((begin + channels.start * spec.channel_bytes, conv, size))
                conv += size
            begin += part.num_channels * spec.channel_bytes
            found.append((begin + part.heads.start * spec.head_bytes, recurrent, len(part.heads) * spec.head_bytes))
        return found

    def keep(self, slots: Sequence[int]) -> Callable[[], object]:
        at = torch.tensor(slots)
        kept = self._rows[at]
        return lambda: self._rows.index_copy_(0, at, kept)

    def _view(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        return self.buffer.view(dtype).as_strided(
            (self._num_rows, *shape),
            (self.slot_bytes // dtype.itemsize, *strides),
            offset_bytes // dtype.itemsize,
        )


def _offsets(specs: Sequence[StateSpec]) -> list[tuple[int, int]]:
    offsets, at = [], 0
    for spec in specs:
        conv = align(at, SLOT_ALIGN_BYTES)
        recurrent = align(conv + spec.conv_bytes, SLOT_ALIGN_BYTES)
        offsets.append((conv, recurrent))
        at = recurrent + spec.recurrent_bytes
    return offsets
