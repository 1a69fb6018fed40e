"""Rows of the running requests: slot -> request. The executor keeps per-slot state (page rows, sampling, FutureMap)."""

from engine.core.futures import check_no_future
from engine.core.request import Request


class RequestTable:
    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1
        self._rows: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._closed: list[int] = []  # since the last plan

    @property
    def num_free(self) -> int:
        return len(self._free)

    def open(self, request: Request) -> int:
        assert self._free, "no slot is free"
        assert request.slot is None, f"{request.rid} has slot {request.slot} already"
        slot = self._free.pop()
        self._rows[slot] = request
        request.slot, request.num_synced_pages, request.num_synced_window = slot, 0, 0
        return slot

    def close(self, request: Request) -> None:
        slot = request.slot
        assert slot is not None and self._rows[slot] is request
        check_no_future(request)
        self._rows[slot] = None
        self._free.append(slot)
        request.slot = None
        self._closed.append(slot)

    def take_closed(self) -> list[int]:
        """Take the slots closed since the last call, for the next plan."""
        closed, self._closed = self._closed, []
        return closed

    def check(self) -> None:
        assert len(set(self._free)) == len(self._free)
        for slot, request in enumerate(self._rows):
            assert (request is None) == (slot in self._free)
            assert request is None or request.slot == slot
