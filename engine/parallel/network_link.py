"""Hidden states from rank i of one pipeline stage to rank i of the next on another machine, over TCP."""

import torch
from torch import Tensor

from engine.parallel.rank_connection import RankConnection


class NetworkStageLink:
    """`HiddenStates` of [T, hidden] `dtype`. What the sockets do not hold waits in `send`."""

    def __init__(self, other: RankConnection, *, hidden: int, dtype: torch.dtype) -> None:
        self._other = other
        self._hidden = hidden
        self._dtype = dtype

    def send(self, x: Tensor) -> None:
        """Hand over x [T, hidden]; it may be written again at return. Raises RanksEnded."""
        self._other.send(x.to(self._dtype).contiguous())

    def receive(self, rows: int) -> Tensor:
        """Return the next [rows, hidden]. Raises RanksEnded."""
        out = torch.empty((rows, self._hidden), dtype=self._dtype)
        self._other.receive(out)
        return out
