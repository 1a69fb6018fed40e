"""What the kernels of recurrent layers receive of a step: whose rows are where, and in which slot each request's state lies."""

import ctypes
from collections.abc import Sequence

import torch

from engine.kernels.build import fields
from engine.kv.state_pool import StatePool


class _Rows(ctypes.Structure):
    """Mirror of `struct state_rows` in states.h."""

    _fields_ = fields(("starts", "slots"), ("batch",))


class StateRows:
    """One structure for all steps of a pool on a CPU: a tape's calls point here, too, and so read a new step."""

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self._rows = _Rows()
        self._kept: tuple[torch.Tensor, ...] = ()  # what the addresses in _rows point into

    @property
    def address(self) -> int:
        return ctypes.addressof(self._rows)

    def begin(self, lens: Sequence[int], slots: torch.Tensor) -> None:
        """Requests of equally many rows, one behind the other, whose states are in `slots` [batch] int32, none twice."""
        assert slots.dtype == torch.int32 and len(slots) == len(lens), slots
        low, high = slots.aminmax()
        assert int(low) >= 0 and int(high) <= self._pool.num_slots, (int(low), int(high))  # C trusts them
        starts = torch.zeros(len(slots) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor(lens), 0, out=starts[1:])
        self._kept = (starts, slots.contiguous())
        self._rows.starts, self._rows.slots = (x.data_ptr() for x in self._kept)
        self._rows.batch = len(slots)
