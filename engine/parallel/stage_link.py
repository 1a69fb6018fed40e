"""Hidden states from rank i of a pipeline stage to rank i of the next.

StageLink          ring of slots in one machine's shared memory
NetworkStageLink   TCP between machines
GroupLink          process group of two GPUs: in the stream, without host waits
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.network import RankConnection
from engine.parallel.region import SharedRegion


class HiddenStates(Protocol):
    def send(self, x: Tensor) -> None: ...

    def receive(self, rows: int) -> Tensor: ...


class StageLink:
    """Ring from `stage` to `stage + 1`; `send` waits with `plan.link_depth` full slots."""

    def __init__(self, region: SharedRegion, *, stage: int, rank: int, dtype: torch.dtype) -> None:
        plan = region.plan
        self._region = region
        self._sent, self._taken = region.tensor(plan.link_lines(stage, rank), (2, 8), torch.int64)[:, :1]
        first = plan.link_slots(stage, rank)
        self._slots = [
            region.tensor(first + i * plan.link_bytes, (plan.link_rows, plan.hidden), dtype)
            for i in range(plan.link_depth)
        ]

    def send(self, x: Tensor) -> None:
        """Send x [T, hidden], reusable at return. Raises RanksEnded."""
        for rows in _slots_of(x, len(self._slots[0])):
            sent = int(self._sent.item())
            self._region.wait(self._taken, sent + 1 - len(self._slots))
            self._slots[sent % len(self._slots)][: len(rows)] = rows
            self._region.publish(self._sent, sent + 1)

    def receive(self, rows: int) -> Tensor:
        """The next [rows, hidden]. Raises RanksEnded."""
        first = self._slots[0]
        out = torch.empty((rows, first.shape[1]), dtype=first.dtype)
        for part in _slots_of(out, len(first)):
            taken = int(self._taken.item())
            self._region.wait(self._sent, taken + 1)
            part.copy_(self._slots[taken % len(self._slots)][: len(part)])
            self._region.publish(self._taken, taken + 1)
        return out


def _slots_of(x: Tensor, rows: int) -> list[Tensor]:
    return [x[begin : begin + rows] for begin in range(0, len(x), rows)]


class GroupLink:
    """`HiddenStates` over a group of two; a stage continues after the next has received."""

    def __init__(self, group: dist.ProcessGroup, *, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._other = 1 - group.rank()
        self._like = torch.empty((0, hidden), dtype=dtype, device=device)

    def send(self, x: Tensor) -> None:
        self._group.send([x.contiguous()], self._other, 0).wait()

    def receive(self, rows: int) -> Tensor:
        out = self._like.new_empty((rows, self._like.shape[1]))
        self._group.recv([out], self._other, 0).wait()
        return out


class NetworkStageLink:
    """`HiddenStates` over TCP; `send` waits for socket space."""

    def __init__(self, other: RankConnection, *, hidden: int, dtype: torch.dtype) -> None:
        self._other = other
        self._hidden = hidden
        self._dtype = dtype

    def send(self, x: Tensor) -> None:
        self._other.send(x.to(self._dtype).contiguous())

    def receive(self, rows: int) -> Tensor:
        out = torch.empty((rows, self._hidden), dtype=self._dtype)
        self._other.receive(out)
        return out
