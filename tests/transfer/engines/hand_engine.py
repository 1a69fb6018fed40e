"""An engine whose operations end when the test says so."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.transfer.cores import CAPS
from transfer_backends.contract import EngineError, OpState, Pieces


@dataclass(eq=False)
class HandOp:
    what: str
    peer: Any
    state: OpState = OpState.PENDING


class HandEngine:
    """`ops`: started, in order. `refuses`: names of calls that raise. `polls`: calls of `progress`."""

    def __init__(self, **caps: Any) -> None:
        self.caps = replace(CAPS, **caps)
        self.ops: list[HandOp] = []
        self.refuses: set[str] = set()
        self.polls = 0
        self.connected: list[tuple[str, bytes]] = []
        self.closed = False

    def register(self, regions: Any) -> None:
        self.registered = list(regions)

    def descriptor(self) -> bytes:
        return b"by hand"

    def connect(self, incarnation: str, descriptor: bytes) -> tuple[str, bytes]:
        self._refuse("connect")
        self.connected.append((incarnation, descriptor))
        return self.connected[-1]

    def disconnect(self, peer: Any) -> None:
        self.connected.remove(peer)

    def post(self, peer: Any, pieces: Pieces) -> HandOp:
        return self._start("post", peer)

    def probe(self, peer: Any) -> HandOp:
        return self._start("probe", peer)

    def trial(self, peer: Any) -> None:
        """It moves no bytes."""

    def fence(self, peer: Any) -> HandOp:
        return self._start("fence", peer)

    def poll(self, op: HandOp) -> OpState:
        self._refuse("poll")
        return op.state

    def progress(self, *, eager: bool = False) -> None:
        self.polls += 1

    def close(self) -> None:
        self.closed = True

    def end(self, what: str, state: OpState = OpState.DONE) -> None:
        """End all pending operations of this kind; there is one at least."""
        found = [op for op in self.ops if op.what == what and op.state is OpState.PENDING]
        assert found, f"no {what} is pending"
        for op in found:
            op.state = state

    def _start(self, what: str, peer: Any) -> HandOp:
        self._refuse(what)
        self.ops.append(HandOp(what, peer))
        return self.ops[-1]

    def _refuse(self, what: str) -> None:
        if what in self.refuses:
            raise EngineError(f"{what} is refused")


def driven(step: Callable[[], Any], times: int = 4) -> None:
    for _ in range(times):
        step()
