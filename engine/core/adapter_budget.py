"""Which adapters the next step may hold: at most `max_loras_per_batch`, adapters of running requests included.

A request whose adapter has no place is skipped, after SGLang. Once it has waited `lora_drain_wait_s`, the adapter in use that
ends soonest takes no new requests, and the waiting one gets its place.
"""

from collections.abc import Iterable

from engine.core.limits import Limits
from engine.core.request import Request


class AdapterBudget:
    """The adapters of one step. `growing`: requests that compute or are about to; `waiting`: in order of arrival."""

    def __init__(
        self, limits: Limits, *, growing: Iterable[Request], waiting: Iterable[Request], now_s: float = 0.0
    ) -> None:
        self._places = limits.max_loras_per_batch
        self._ending: int | None = None  # takes no new requests
        self._promised: set[int] = set()  # at most one: it gets the next free place
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
        """Find the first request that has waited too long for an adapter that no request uses now."""
        if wait_s is None:
            return None
        for request in waiting:
            if now_s - request.arrived_s < wait_s:
                return None
            if request.adapter and request.adapter not in self._used:
                return request
        return None


def _ends_soonest(running: list[Request]) -> int:
    """Return the adapter whose longest request has least left to compute; of two equal ones, the older load."""
    left: dict[int, int] = {}
    for request in running:
        own = request.num_tokens - request.launched_len + request.samples_left
        left[request.adapter] = max(own, left.get(request.adapter, 0))
    return min(left, key=lambda adapter: (left[adapter], adapter))
