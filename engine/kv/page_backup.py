"""Host copies of retracted requests' KV, in plan order."""

from collections.abc import Iterable, Sequence

from engine.core.plan import PageCopy, Plan
from engine.kv.host_pool import HostPool


class PageBackup:
    def __init__(self, host: HostPool, *, windows: HostPool | None = None, states: HostPool | None = None) -> None:
        self.hosts = [pool for pool in (host, windows, states) if pool is not None]
        self._pages = _Copies(host)
        self._windows = None if windows is None else _Copies(windows)
        self._states = None if states is None else _Copies(states)

    def run(self, plan: Plan) -> None:
        """Drop, then load, then save: earlier ones make room within a step."""
        loads, saves = plan.loads, plan.saves
        self._pages.run(plan, [(b.key, b.start, b.pages) for b in loads], [(out.key, out.pages) for out in saves])
        if self._windows is not None:
            self._windows.run(plan, [(b.key, 0, b.window) for b in loads], [(out.key, out.window) for out in saves])
        if self._states is not None:
            self._states.run(plan, [(b.key, 0, [b.state]) for b in loads], [(out.key, [out.state]) for out in saves])


class _Copies:
    def __init__(self, host: HostPool) -> None:
        self._host = host
        self._free = list(range(host.num_pages - 1, -1, -1))  # popped from the end: low pages first
        self._copies: dict[int, list[int]] = {}  # key -> host pages

    def run(
        self, plan: Plan, loads: Iterable[tuple[int, int, Sequence[int]]], saves: Iterable[tuple[int, Sequence[int]]]
    ) -> None:
        """`loads`: (key, first page of the copy, pages); `saves`: (key, pages)."""
        for key in plan.drops:
            self._free += reversed(self._copies.pop(key))
        back = [copy for load in loads for copy in self._load(*load)]
        self._host.copy(plan.seq, out=[], back=back)
        out = [copy for save in saves for copy in self._save(*save)]
        self._host.copy(plan.seq, out=out, back=[])

    def _save(self, key: int, pages: Sequence[int]) -> list[PageCopy]:
        assert len(pages) <= len(self._free), "more copies than the host has room for"
        host_pages = self._copies[key] = [self._free.pop() for _ in pages]
        return [PageCopy(page, host_page) for page, host_page in zip(pages, host_pages, strict=True)]

    def _load(self, key: int, start: int, pages: Sequence[int]) -> list[PageCopy]:
        """Free its host pages at once: the next save runs after."""
        host_pages = self._copies.pop(key)
        self._free += reversed(host_pages)
        chosen = host_pages[start : start + len(pages)]
        return [PageCopy(page, host_page) for page, host_page in zip(pages, chosen, strict=True)]
