"""Adapters allowed in the next step: at most `max_loras_per_batch`, with running ones.

Others are skipped, as in SGLang. After `lora_drain_wait_s` the adapter that ends soonest takes no
new requests.
"""

from collections.abc import Iterable

from engine.core.limits import Limits
from engine.core.request import Request


class AdapterBudget:
    """Adapters of one step; `growing` requests compute or are about to."""

    def __init__(
        self, limits: Limits, *, growing: Iterable[Request], waiting: Iterable[Request], now_s: float = 0.0
    ) -> None:
        self._places = limits.max_loras_per_batch
        self._ending: int | None = None  # drains: takes no new requests
        self._promised: set[int] = set()  # at most one: gets the next free place
        running = [r for r in growing if r.adapter]
        self._used = {r.adapter for r in running}
        overdue = self._overdue(waiting, limits.lora_drain_wait_s, now_s)
        if overdue is not None:
            self._promised = {overdue.adapter}
            self._ending = _ends_soonest(running) if len(self._used) >= self._places else None

    def has_place(self, request: Request) -> bool:
        adapter = request.adapter
        if not adapter:
            return True
        if adapter in self._used:
            return adapter != self._ending
        return len(self._used | self._promised | {adapter}) <= self._places

    def take(self, request: Request) -> None:
        assert self.has_place(request)
        if request.adapter:
            self._used.add(request.adapter)

    def _overdue(self, waiting: Iterable[Request], wait_s: float | None, now_s: float) -> Request | None:
        if wait_s is None:
            return None
        for request in waiting:
            if now_s - request.arrived_s < wait_s:
                return None
            if request.adapter and request.adapter not in self._used:
                return request
        return None


def _ends_soonest(running: list[Request]) -> int:
    """Return the adapter with the least work left; ties: the older load."""
    left: dict[int, int] = {}
    for request in running:
        own = request.num_tokens - request.launched_len + request.samples_left
        left[request.adapter] = max(own, left.get(request.adapter, 0))
    return min(left, key=lambda adapter: (left[adapter], adapter))
