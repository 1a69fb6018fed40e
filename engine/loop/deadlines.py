"""Deadlines of requests: the loop ends a request at its deadline, in any stage."""

import heapq
import math
from collections.abc import Iterator, Sequence

from engine.loop.listener import LoopListener
from engine.messages import FinishReason, GenerateRequest, TokenOutput

SPARE = 64  # entries of ended requests that the heap may keep
SOON_S = 0.001


def too_late(timeout_s: float) -> FinishReason:
    message = (
        f"the request was not done within its timeout of {timeout_s:g} s (x-request-timeout or --default-deadline)"
    )
    return FinishReason(kind="abort", message=message, status=504)


class Deadlines(LoopListener):
    def __init__(self) -> None:
        self._live: dict[str, tuple[float, float]] = {}  # rid: when, and the timeout it comes from
        self._order: list[tuple[float, str]] = []  # a heap; may name requests that have ended

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
        """Yield each request whose time is over once, and the reason for its end."""
        while self._order and self._order[0][0] <= now_s:
            at_s, rid = heapq.heappop(self._order)
            if self._live.get(rid, (math.nan, 0.0))[0] == at_s:
                yield rid, too_late(self._live.pop(rid)[1])

    def shorten(self, wait_s: float, now_s: float) -> float:
        """Shorten a rest of `wait_s` so that no deadline is missed."""
        while self._order and self._order[0][1] not in self._live:
            heapq.heappop(self._order)
        return wait_s if not self._order else min(wait_s, max(SOON_S, self._order[0][0] - now_s))
