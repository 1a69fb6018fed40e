"""An engine that moves no bytes: it counts, waits and fails as configured. Deterministic by seed.

For tests of everything above engines, for control-plane load, and for `--disaggregation-transfer-backend fake`.
"""

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
    """`delay_s`: time an operation takes; `failure_rate`: share that fails; `late_rate`, `late_s`: share that takes longer."""

    def __init__(
        self,
        *,
        delay_s: float = 0.0,
        failure_rate: float = 0.0,
        late_rate: float = 0.0,
        late_s: float = 0.0,
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
        )
        self.num_posts = 0
        self.num_bytes = 0
        self._delay_s = delay_s
        self._failure_rate = failure_rate
        self._late_rate = late_rate
        self._late_s = late_s
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
        self.num_posts += 1
        self.num_bytes += pieces.size_bytes
        failed = self._random.random() < self._failure_rate
        late_s = self._late_s if self._random.random() < self._late_rate else 0.0
        return FakeOp(self._clock() + self._delay_s + late_s, OpState.FAILED if failed else OpState.DONE)

    def probe(self, peer: Any) -> FakeOp:
        return FakeOp(self._clock(), OpState.DONE)

    def fence(self, peer: Any) -> FakeOp:
        return FakeOp(self._clock(), OpState.DONE)

    def poll(self, op: FakeOp) -> OpState:
        return op.state if self._clock() >= op.due_s else OpState.PENDING

    def progress(self) -> None:
        pass

    def close(self) -> None:
        pass
