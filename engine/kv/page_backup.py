"""Copies of retracted requests' KV pages in host memory, out and back in the order of plans."""

from engine.core.plan import PageCopy, PageLoad, PageSave, Plan
from engine.kv.host_pool import HostPool


class PageBackup:
    """`host`: room for the pages of all copies at once."""

    def __init__(self, host: HostPool) -> None:
        self.host = host
        self._free = list(range(host.num_pages - 1, -1, -1))  # popped from the end: low pages first
        self._copies: dict[int, list[int]] = {}  # key -> host pages

    def run(self, plan: Plan) -> None:
        """Drop copies, then copy back, then out: what is dropped or loaded makes room for what is saved in the same step."""
        for key in plan.drops:
            self._free += reversed(self._copies.pop(key))
        if plan.loads:
            self.host.copy(plan.seq, out=[], back=[copy for load in plan.loads for copy in self._load(load)])
        if plan.saves:
            self.host.copy(plan.seq, out=[copy for save in plan.saves for copy in self._save(save)], back=[])

    def _save(self, save: PageSave) -> list[PageCopy]:
        assert len(save.pages) <= len(self._free), "more copies than the host has room for"
        host_pages = [self._free.pop() for _ in save.pages]
        self._copies[save.key] = host_pages
        return [PageCopy(page, host_page) for page, host_page in zip(save.pages, host_pages, strict=True)]

    def _load(self, load: PageLoad) -> list[PageCopy]:
        """Its host pages are free at once: the next copy out runs behind."""
        host_pages = self._copies.pop(load.key)
        self._free += reversed(host_pages)
        chosen = host_pages[load.start : load.start + len(load.pages)]
        return [PageCopy(page, host_page) for page, host_page in zip(load.pages, chosen, strict=True)]
