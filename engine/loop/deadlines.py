"""Deadlines of requests, in any stage."""

import heapq
import math
from collections.abc import Iterator, Sequence

from engine.loop.listener import LoopListener
from engine.messages import FinishReason, GenerateRequest, TokenOutput

SPARE = 64  # entries of ended requests that the heap may hold
SOON_S = 0.001


def too_late(timeout_s: float) -> FinishReason:
    message = (
        f"the request was not done within its timeout of {timeout_s:g} s (x-request-timeout or --default-deadline)"
    )
    return FinishReason(kind="abort", message=message, status=504)


class Deadlines(LoopListener):
    def __init__(self) -> None:
        self._live: dict[str, tuple[float, float]] = {}  # rid: deadline and original timeout
        self._order: list[tuple[float, str]] = []  # heap, may have ended requests

    def __len__(self) -> int:
        return len(self._live)

    def on_received(self, message: GenerateRequest, now_s: float) -> None:
        if message.timeout_s is None or not message.timeout_s < math.inf:
            return
        at_s = now_s + message.timeout_s
        self._live[message.rid] = (at_s, message.timeout_s)
        heapq.heappush(self._order, (at_s, message.rid))
        if len(self._order) > 2 * len(self._live) + SPARE:
            self._order = sorted((at_s, rid) for rid, (at_s, _) in self._live.items())

    def on_outputs(self, outputs: Sequence[TokenOutput], now_s: float) -> None:
        for output in outputs:
            if output.finish is not None:
                self._live.pop(output.rid, None)

    def due(self, now_s: float) -> Iterator[tuple[str, FinishReason]]:
        while self._order and self._order[0][0] <= now_s:
            at_s, rid = heapq.heappop(self._order)
            if self._live.get(rid, (math.nan, 0.0))[0] == at_s:
                yield rid, too_late(self._live.pop(rid)[1])

    def shorten(self, wait_s: float, now_s: float) -> float:
        while self._order and self._order[0][1] not in self._live:
            heapq.heappop(self._order)
        return wait_s if not self._order else min(wait_s, max(SOON_S, self._order[0][0] - now_s))
