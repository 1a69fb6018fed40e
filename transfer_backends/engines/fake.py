"""Engine that moves no bytes: it waits and fails as configured."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transfer_backends.contract import Caps, Clock, OpState, Pieces, Region


@dataclass(eq=False)
class FakeOp:
    due_s: float
    state: OpState


class FakeEngine:
    def __init__(
        self,
        *,
        delay_s: float = 0.0,
        failure_rate: float = 0.0,
        seed: int = 0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.caps = Caps(
            name="fake",
            max_inflight=1024,
            max_inflight_bytes=1 << 30,
            max_post_pieces=256,
            max_post_bytes=64 << 20,
            max_piece_bytes=64 << 20,
            target_must_poll=False,
            settle_s=0.0,
            resend_s=0.0,
        )
        self._delay_s = delay_s
        self._failure_rate = failure_rate
        self._random = random.Random(seed)
        self._clock = clock

    def register(self, regions: Sequence[Region]) -> None:
        pass

    def descriptor(self) -> bytes:
        return b"fake"

    def connect(self, incarnation: str, descriptor: bytes) -> Any:
        return incarnation

    def disconnect(self, peer: Any) -> None:
        pass

    def post(self, peer: Any, pieces: Pieces) -> FakeOp:
        failed = self._random.random() < self._failure_rate
        return FakeOp(self._clock() + self._delay_s, OpState.FAILED if failed else OpState.DONE)

    def probe(self, peer: Any) -> FakeOp:
        return FakeOp(self._clock(), OpState.DONE)

    def trial(self, peer: Any) -> None:
        """Nothing to measure."""

    def fence(self, peer: Any) -> FakeOp:
        return FakeOp(self._clock(), OpState.DONE)

    def poll(self, op: FakeOp) -> OpState:
        return op.state if self._clock() >= op.due_s else OpState.PENDING

    def progress(self, *, eager: bool = False) -> None:
        pass

    def close(self) -> None:
        pass
