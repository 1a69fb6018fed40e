"""Live requests by stage, the only place of stage changes.

add ---> waiting ---> chunked / running ---> (ended) ---> draining ---> gone
            ^                |                               |
            +--- retracted --+              held: the role decides when its memory goes
                                leaving: a step in flight --+
"""

from itertools import chain

from engine.core.adapters import AdapterBudget
from engine.core.plan import Phase
from engine.core.policy import Limits
from engine.core.request import Request


class Stages:
    """`batch_is_full`: the last waiting request had no room, and nothing was freed since."""

    def __init__(self) -> None:
        self.live: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}  # in order of arrival
        self.chunked: Request | None = None  # the prompt in chunks
        self.running: list[Request] = []
        self.draining: list[Request] = []  # finished or retracted, a step in flight
        self.leaving: list[Request] = []  # for another worker, a step in flight
        self.held: list[Request] = []  # by the role: KV is handed over, or comes from elsewhere
        self.newly_retracted: list[Request] = []  # held ones that the role has not taken
        self.batch_is_full = False

    @property
    def num_running(self) -> int:
        return len(self.running) + (self.chunked is not None)

    def register(self, request: Request, *, serial: int) -> None:
        assert request.rid not in self.live
        self.live[request.rid] = request
        request.serial = serial

    def unstage(self, request: Request) -> None:
        if request is self.chunked:
            self.chunked = None
            return
        if self.waiting.pop(request.rid, None) is not None:
            return
        for stage in (self.running, self.draining, self.leaving):
            if request in stage:
                stage.remove(request)
                return
        raise AssertionError(f"{request.rid} is in no stage")

    def requeue(self, request: Request) -> None:
        self.waiting = {r.rid: r for r in sorted([request, *self.waiting.values()], key=lambda r: r.serial)}

    def take_computing(self) -> list[Request]:
        """Remove computing requests, except a prompt in handover: a peer reads it."""
        taken, self.running = self.running, []
        if self.chunked is not None and not self.chunked.prefill_only:
            taken.append(self.chunked)
            self.chunked = None
        return taken

    def take_settled(self) -> list[Request]:
        """Remove finished and retracted requests after their last step."""
        settled = [r for r in self.draining if r.inflight == 0]
        self.draining = [r for r in self.draining if r.inflight > 0]
        return settled

    def take_departed(self) -> list[Request]:
        """Remove moved requests after their last step."""
        departed = [r for r in self.leaving if r.inflight == 0]
        self.leaving = [r for r in self.leaving if r.inflight > 0]
        return departed

    def growing(self) -> list[Request]:
        chunked = [self.chunked] if self.chunked is not None else []
        coming = [r for r in self.held if not r.prefill_only and not r.moves and r.pages and r.finish is None]
        return self.running + chunked + coming

    def adapter_budget(self, limits: Limits, *, now_s: float) -> AdapterBudget:
        if limits.max_loras_per_batch == 0:
            return AdapterBudget(limits, growing=(), waiting=())
        waiting = chain(self.waiting.values(), (r for r in self.held if not r.pages and r.finish is None))
        return AdapterBudget(limits, growing=self.growing(), waiting=waiting, now_s=now_s)

    @property
    def retraction_pending(self) -> bool:
        """The next collected step frees a retracted request."""
        return any(r.finish is None for r in self.draining)

    def retracted(self) -> list[Request]:
        """Retracted requests that wait for memory or for KV from elsewhere."""
        waiting = [r for r in self.waiting.values() if r.stats.retractions > 0]
        elsewhere = [r for r in self.held if r.stats.retractions > 0 and not r.pages and r.finish is None]
        return [*waiting, *(r for r in self.draining if r.finish is None), *elsewhere]

    def all(self) -> list[Request]:
        chunked = [self.chunked] if self.chunked is not None else []
        return [*self.waiting.values(), *self.running, *self.draining, *self.leaving, *self.held, *chunked]

    def check(self) -> None:
        assert sorted(r.rid for r in self.all()) == sorted(self.live), "a live request is in no stage, or in two"
        for request in self.all():
            assert 0 <= request.pending <= request.inflight
            assert request.computed_len <= request.launched_len


# ---- checks of samples in flight


def check_reads(request: Request, start: int, end: int) -> None:
    """Check that tokens start..end-1 are known, or end with the cell's.

    The device has one cell per slot (engine/executor/forward.py). Steps run in plan order, reads
    before writes. One cell suffices if each step that samples over a sample in flight also reads
    it, and slots change owner with nothing in flight.

        token at position   known-1 | known ... known+pending-2 | known+pending-1 | not planned
                            on host | in flight and read already | in flight, in the cell
    """
    known, pending = request.num_tokens, request.pending
    if pending == 0:
        assert end <= known, (
            f"{request.rid}: position {end - 1} is read, and only {known} tokens are known or in flight"
        )
    else:
        last = known + pending - 1
        assert (start, end) == (last, last + 1), f"{request.rid}: positions {start}..{end - 1}, the cell holds {last}"


def check_no_future(request: Request) -> None:
    assert request.pending == 0, f"{request.rid}: its slot is given back with {request.pending} samples in flight"


# ---- Slots of running requests, for the executor's per-slot state.


class RequestTable:
    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1
        self._rows: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._closed: dict[Phase | None, list[int]] = {}  # since the stream's last plan

    @property
    def num_free(self) -> int:
        return len(self._free)

    def open(self, request: Request) -> int:
        assert self._free, "no slot is free"
        assert request.slot is None, f"{request.rid} has slot {request.slot} already"
        slot = self._free.pop()
        self._rows[slot] = request
        request.slot, request.phase, request.num_synced_pages, request.windows.num_synced = slot, None, 0, 0
        return slot

    def reopen(self, request: Request) -> int:
        """Move the row to another stream; no step may be in flight."""
        slot = request.slot
        assert slot is not None and request.inflight == 0, (
            f"{request.rid}: its row changes streams under a step in flight"
        )
        self._closed.setdefault(request.phase, []).append(slot)
        request.phase, request.num_synced_pages, request.windows.num_synced = None, 0, 0
        return slot

    def close(self, request: Request) -> None:
        slot = request.slot
        assert slot is not None and self._rows[slot] is request
        check_no_future(request)
        self._rows[slot] = None
        self._free.append(slot)
        request.slot = None
        self._closed.setdefault(request.phase, []).append(slot)

    def take_closed(self, phase: Phase | None = None) -> list[int]:
        return self._closed.pop(phase, [])

    def check(self) -> None:
        assert len(set(self._free)) == len(self._free)
        for slot, request in enumerate(self._rows):
            assert (request is None) == (slot in self._free)
            assert request is None or request.slot == slot
        for closed in self._closed.values():
            assert len(set(closed)) == len(closed), "a row is closed twice"
