"""The engines by which the contract suite moves bytes, each by its name, or with ROWS: as if it carried no host memory."""

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from transfer_backends.contract import EngineError, FakeEngine, OpState, Pieces
from transfer_backends.engines.registry import make_engine

ROWS = ", rows by message"


@dataclass(frozen=True)
class SlowOp:
    due_s: float
    state: OpState


class SlowEngine(FakeEngine):
    """Posts end `delay_s` later, and fail if `fails`. `refusals`: calls of a kind that are refused at first; `calls`: all of them.

    `trial_s`: what a trial write of a gigabyte takes of `now_s`; None: it moves nothing.
    """

    def __init__(
        self, delay_s: float = 0.0, *, fails: bool = False, trial_s: float | None = None, **refusals: int
    ) -> None:
        super().__init__()
        self.delay_s = delay_s
        self.fails = fails
        self.now_s = 0.0
        self.calls: Counter[str] = Counter()
        self._trial_s, self._refusals = trial_s, refusals

    def _count(self, what: str) -> None:
        self.calls[what] += 1
        if self.calls[what] <= self._refusals.get(what, 0):
            raise EngineError(f"{what} is refused")

    def post(self, peer: Any, pieces: Pieces) -> Any:
        self._count("post")
        return SlowOp(time.monotonic() + self.delay_s, OpState.FAILED if self.fails else OpState.DONE)

    def trial(self, peer: Any) -> Any:
        self._count("trial")
        if self._trial_s is None:
            return None
        self.now_s += self._trial_s
        return self.probe(peer), 10**9

    def poll(self, op: Any) -> OpState:
        if isinstance(op, OpState):
            return op
        return op.state if time.monotonic() >= op.due_s else OpState.PENDING


def engine_of(way: str, *, fake_delay_s: float = 0.0) -> Any:
    name = way.removesuffix(ROWS)
    engine: Any = SlowEngine(fake_delay_s) if name == "fake" else make_engine(name)
    if way.endswith(ROWS):
        engine.caps = replace(engine.caps, carries_host_memory=False)
    return engine


def moves_rows(way: str) -> bool:
    """Metadata rows arrive: the fake engine moves nothing."""
    return way != "fake"


def moves_pages(way: str) -> bool:
    return not way.startswith("fake")
