"""What ranks exchange within a layer, apart from who waits for it: so the same layers serve a step at once and a step in two halves.

    stages of a layer   computes, yields an `RankExchange`, gets what it gave, computes on ... returns the result
    at once             each exchange where it stands: an ordinary step
    two halves          a half computes while the exchange of the other is under way (engine/executor/two_halves.py)

The exchanges of the halves must not meet, so the second half's go another way between the same ranks: `Collectives.beside`.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from engine.parallel.collectives import Collectives

T = TypeVar("T")
R = TypeVar("R", bound=Collectives)


@dataclass(frozen=True, slots=True)
class RankExchange(Generic[R]):
    """`work` of `ranks`, which any thread may do, one at a time."""

    ranks: R
    work: Callable[[R], Tensor]

    def run(self) -> Tensor:
        return self.work(self.ranks)


# None: nothing, in the place of an exchange that other ranks make
Stages = Generator[RankExchange[R] | None, Tensor | None, T]


def given(answer: Tensor | None) -> Tensor:
    """Return the result of an exchange."""
    assert answer is not None
    return answer


def at_once(stages: Stages[R, T]) -> T:
    """Run to the end, each exchange where it stands."""
    answer: Tensor | None = None
    while True:
        try:
            exchange = stages.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = None if exchange is None else exchange.run()
