"""Host copies of retracted requests' KV: saving, restoring, dropping.

  retracted --begin--> saving --step collected--> saved, memory freed --restore--> running
      +--- aborted, or no room: dropped, recomputed later

Copies run in plan order. One in flight counts as a step, since a transfer peer may write a freed
page without waiting for our stream. They include the last window and the recurrent state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.mem_cache.memory_part import MemoryPart, RetractedKV, Windows
from engine.core.plan import PageLoad, PageSave, Phase, Plan
from engine.core.request import Request


@dataclass(frozen=True, slots=True)
class CopySize:
    """Pages, window pages, recurrent states."""

    pages: int = 0
    windows: int = 0
    states: int = 0

    def __add__(self, other: "CopySize") -> "CopySize":
        return CopySize(self.pages + other.pages, self.windows + other.windows, self.states + other.states)

    def fits(self, room: "CopySize") -> bool:
        return self.pages <= room.pages and self.windows <= room.windows and self.states <= room.states


NOTHING = CopySize()


class Backups(MemoryPart, RetractedKV):
    """Copies within `room`; other KV is recomputed. `windows`: of layers with their own pool."""

    name = "backups"

    def __init__(self, *, room: CopySize, page_size: int, windows: Windows) -> None:
        self._room = room
        self._page_size = page_size
        self._windows = windows
        self._copies: dict[Request, CopySize] = {}  # from their start
        self._saves: list[PageSave] = []
        self._loads: list[PageLoad] = []
        self._drops: list[int] = []
        self._copying: dict[int, Request] = {}  # by key, copies requested or in flight

    def begin(self, request: Request) -> bool:
        count = -(-request.computed_len // self._page_size)
        if request in self._copies or count == 0:
            return False
        window = self._windows.window_of(request, request.computed_len)
        copy = CopySize(count, len(window), int(request.recurrent.slot > 0))
        if not (self._held + copy).fits(self._room):
            return False
        self._copies[request] = copy
        self._saves.append(PageSave(request.serial, request.pages[:count], window, request.recurrent.slot))
        request.saved_len = request.computed_len
        self._copying[request.serial] = request
        request.inflight += 1
        self.saved_tokens += request.saved_len
        return True

    def restore(self, request: Request) -> None:
        assert request.saved_len == request.num_tokens - 1, "all but the token sampled last is in the copy"
        start = request.launched_len // self._page_size
        count, window = self._copies.pop(request).pages, self._windows.window_of(request, request.saved_len)
        self._loads.append(PageLoad(request.serial, start, request.pages[start:count], window, request.recurrent.slot))
        request.launched_len = request.computed_len = request.saved_len
        request.saved_len = 0
        self._copying[request.serial] = request
        request.inflight += 1
        self.restored_tokens += request.launched_len

    def free(self, request: Request) -> None:
        if request.ended and request in self._copies:
            self._drop(request)

    def _drop(self, request: Request) -> None:
        del self._copies[request]
        self._drops.append(request.serial)
        request.saved_len = 0

    def forget_copies(self) -> None:
        for save in self._saves:
            request = self._copying.pop(save.key)
            request.inflight -= 1
            request.saved_len = 0
            del self._copies[request]
        self._saves.clear()
        assert not self._copying, "copies forgotten while one is in flight"
        for request in list(self._copies):
            self._drop(request)

    def attach(self, plan: Plan) -> None:
        plan.saves, self._saves = self._saves, []
        plan.loads, self._loads = self._loads, []
        plan.drops, self._drops = self._drops, []

    def on_collected(self, plan: Plan, *, failed: bool) -> None:
        for key in [*(save.key for save in plan.saves), *(load.key for load in plan.loads)]:
            self._copying.pop(key).inflight -= 1

    def asks_for_a_step(self, phase: Phase | None) -> bool:
        return bool(self._saves or self._loads or self._drops)

    @property
    def num_pages(self) -> int:
        return self._held.pages

    @property
    def _held(self) -> CopySize:
        return sum(self._copies.values(), NOTHING)

    def check(self, requests: Sequence[Request]) -> None:
        assert set(self._copies) <= set(requests), "a copy of an ended request is kept"
        fits = self._held.fits(self._room)
        assert fits, "copies take more than their room"
