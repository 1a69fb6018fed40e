"""Two halves of a step in turns: one computes while what the other exchanges with other ranks is under way.

    this thread      A attends | B attends | A: experts | B: experts | A attends ...     one layer's stages after the other's
    thread of A        rows to experts ----'  answers back --------'
    thread of B                  rows to experts ----'  answers back ----------'

One thread computes; a thread for each half waits for other ranks and moves bytes, each by a way of its own between them
(engine/parallel/exchange.py). A comes first in each layer, so B finds A's KV there. All ranks take the same turns.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from engine.executor.stream import StreamTask, ThreadStream
from engine.parallel.exchange import RankExchange, Stages

T = TypeVar("T")
MOVES_ALONE = 1  # thread that moves bytes, beside those that compute


class TwoHalves:
    """Its threads start with the first step in halves."""

    def __init__(self) -> None:
        self._ways: list[ThreadStream] = []

    def run(self, stages: Sequence[Stages[Any, T]]) -> list[T]:
        """The results of both halves' `stages`, which have equally many exchanges. Raises what one raises."""
        if not self._ways:
            self._ways = [ThreadStream(num_threads=MOVES_ALONE) for _ in stages]
        first, second = (
            _Half(of_one, way, is_beside=i > 0) for i, (of_one, way) in enumerate(zip(stages, self._ways, strict=True))
        )
        while not second.ended:
            first.advance()
            second.advance()
        assert first.ended, "halves of unequal stages"
        return [first.results[0], second.results[0]]

    def close(self) -> None:
        for way in self._ways:
            way.close()
        self._ways = []


class _Half(Generic[T]):
    def __init__(self, stages: Stages[Any, T], way: ThreadStream, *, is_beside: bool) -> None:
        self._stages = stages
        self._way = way
        self._is_beside = is_beside
        self._under_way: StreamTask[Tensor] | None = None
        self.results: list[T] = []

    @property
    def ended(self) -> bool:
        return bool(self.results)

    def advance(self) -> None:
        """Compute from the end of one exchange to the begin of the next."""
        assert not self.ended, "halves of unequal stages"
        answer = None if self._under_way is None else self._under_way.result()
        self._under_way = None
        try:
            exchange: RankExchange[Any] | None = self._stages.send(answer)
        except StopIteration as end:
            self.results.append(end.value)
            return
        if exchange is not None:
            self._under_way = self._way.submit(exchange.run_beside if self._is_beside else exchange.run)
