"""Slots of running requests, for the executor's per-slot state."""

from engine.core.futures import check_no_future
from engine.core.lanes import Lane
from engine.core.request import Request


class RequestTable:
    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1
        self._rows: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._closed: dict[Lane | None, list[int]] = {}  # since the stream's last plan

    @property
    def num_free(self) -> int:
        return len(self._free)

    def open(self, request: Request) -> int:
        assert self._free, "no slot is free"
        assert request.slot is None, f"{request.rid} has slot {request.slot} already"
        slot = self._free.pop()
        self._rows[slot] = request
        request.slot, request.lane, request.num_synced_pages, request.num_synced_window = slot, None, 0, 0
        return slot

    def reopen(self, request: Request) -> int:
        """Move the row to another stream; no step may be in flight."""
        slot = request.slot
        assert slot is not None and request.inflight == 0, (
            f"{request.rid}: its row changes lanes under a step in flight"
        )
        self._closed.setdefault(request.lane, []).append(slot)
        request.lane, request.num_synced_pages, request.num_synced_window = None, 0, 0
        return slot

    def close(self, request: Request) -> None:
        slot = request.slot
        assert slot is not None and self._rows[slot] is request
        check_no_future(request)
        self._rows[slot] = None
        self._free.append(slot)
        request.slot = None
        self._closed.setdefault(request.lane, []).append(slot)

    def take_closed(self, lane: Lane | None = None) -> list[int]:
        return self._closed.pop(lane, [])

    def check(self) -> None:
        assert len(set(self._free)) == len(self._free)
        for slot, request in enumerate(self._rows):
            assert (request is None) == (slot in self._free)
            assert request is None or request.slot == slot
        for closed in self._closed.values():
            assert len(set(closed)) == len(closed), "a row is closed twice"
