"""Rows and state slots of a step's requests, for kernels of recurrent layers."""

import ctypes
from collections.abc import Sequence

import torch

from engine.kernels.build import fields
from engine.kv.state_pool import StatePool


class _Rows(ctypes.Structure):
    _fields_ = fields(("starts", "slots"), ("batch",))


class StateRows:
    """A pool's one structure on CPU: recorded calls point here, and so read a new step."""

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self._rows = _Rows()
        self._kept: tuple[torch.Tensor, ...] = ()  # keeps alive memory that _rows points to

    @property
    def address(self) -> int:
        return ctypes.addressof(self._rows)

    def begin(self, lens: Sequence[int], slots: torch.Tensor) -> None:
        assert slots.dtype == torch.int32 and len(slots) == len(lens), slots
        low, high = slots.aminmax()
        assert int(low) >= 0 and int(high) <= self._pool.num_slots, (int(low), int(high))  # C trusts them
        starts = torch.zeros(len(slots) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor(lens), 0, out=starts[1:])
        self._kept = (starts, slots.contiguous())
        self._rows.starts, self._rows.slots = (x.data_ptr() for x in self._kept)
        self._rows.batch = len(slots)
