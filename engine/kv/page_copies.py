"""Copies between device pages and host pages, in the order of plans.

DirectCopies   page by page, done when they return (a pool on a CPU)
StagedCopies   on streams of their own beside the forward (a GPU; never run on one yet)
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.core.plan import PageCopy
from engine.kv.side_stream import Mark, SideStream
from engine.kv.upload import upload

STAGING_BYTES = 32 << 20  # of device memory that a lane takes beside the pool
LANES = 2  # of a direction: one gathers or scatters while the other crosses the bus


class PageCopies(Protocol):
    """Pages are rows of words: [pages, page_bytes / 8] int64."""

    def run(self, seq: int, *, out: list[PageCopy], back: list[PageCopy]) -> None:
        """Copy out, then back, for step `seq`: a page may go both ways. What main does next sees what came back."""

    def guard(self, pages: Iterable[int]) -> None:
        """Let main overwrite device `pages` only after the copies out of them."""

    def wait(self, seq: int) -> None:
        """Block until the copies out of every step up to `seq` have landed."""


class DirectCopies:
    def __init__(self, device_pages: Tensor, host_pages: Tensor) -> None:
        self._device_pages = device_pages
        self._host_pages = host_pages

    def run(self, seq: int, *, out: list[PageCopy], back: list[PageCopy]) -> None:
        for copy in out:
            self._host_pages[copy.host_page].copy_(self._device_pages[copy.page])
        for copy in back:
            self._device_pages[copy.page].copy_(self._host_pages[copy.host_page])

    def guard(self, pages: Iterable[int]) -> None:
        """Nothing is under way."""

    def wait(self, seq: int) -> None:
        """Nothing is under way."""


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Copies out of a step that may still run."""

    seq: int
    pages: frozenset[int]
    host_pages: frozenset[int]
    marks: list[Mark]


class StagedCopies:
    """A copy is a gather (or scatter) on the device and one transfer for each run of neighbouring host pages.

    Two directions, so that loads never queue behind write-through. What orders them:

    out     after all that main had when it was planned: pages are written before they leave
    main    after the loads of its step; before it overwrites a page that leaves, after that copy (`guard`)
    back    after the copies out that touch the same page; nothing else, since a free page has no step in flight
    a batch after the batch before it in its direction

    A host page must not change until its step is collected, and that waits for `wait`.
    """

    def __init__(self, device_pages: Tensor, host_pages: Tensor, *, make_stream: Callable[[], SideStream]) -> None:
        self._device_pages = device_pages
        self._host_pages = host_pages
        self._out = _Direction(device_pages, make_stream)
        self._back = _Direction(device_pages, make_stream)
        self._leaving: deque[_Leaving] = deque()

    def run(self, seq: int, *, out: list[PageCopy], back: list[PageCopy]) -> None:
        if out:
            self._out.follow_main()
            marks = self._out.run(out, self._copy_out)
            pages, host_pages = frozenset(c.page for c in out), frozenset(c.host_page for c in out)
            self._leaving.append(_Leaving(seq, pages, host_pages, marks))
        if back:
            for leaving in self._leaving:
                if any(c.page in leaving.pages or c.host_page in leaving.host_pages for c in back):
                    self._back.follow(leaving.marks)
            for mark in self._back.run(back, self._copy_back):
                mark.hold_main()

    def guard(self, pages: Iterable[int]) -> None:
        if not self._leaving:
            return
        written = frozenset(pages)
        for leaving in self._leaving:
            if not written.isdisjoint(leaving.pages):
                for mark in leaving.marks:
                    mark.hold_main()

    def wait(self, seq: int) -> None:
        while self._leaving and self._leaving[0].seq <= seq:
            for mark in self._leaving.popleft().marks:
                mark.wait()

    def _copy_out(self, copies: list[PageCopy], staging: Tensor) -> None:
        torch.index_select(self._device_pages, 0, self._index(copies), out=staging)
        for at, host_page, n in runs([c.host_page for c in copies]):
            self._host_pages[host_page : host_page + n].copy_(staging[at : at + n], non_blocking=True)

    def _copy_back(self, copies: list[PageCopy], staging: Tensor) -> None:
        for at, host_page, n in runs([c.host_page for c in copies]):
            staging[at : at + n].copy_(self._host_pages[host_page : host_page + n], non_blocking=True)
        self._device_pages[self._index(copies)] = staging

    def _index(self, copies: list[PageCopy]) -> Tensor:
        return upload(torch.tensor([c.page for c in copies], dtype=torch.int64), self._device_pages.device)


class _Direction:
    """Lanes that take turns: each is a stream and its staging buffer, which the stream's order protects."""

    def __init__(self, pages: Tensor, make_stream: Callable[[], SideStream]) -> None:
        self._per_piece = max(1, STAGING_BYTES // (pages.shape[1] * pages.element_size()))
        self._lanes = [(make_stream(), pages.new_empty(self._per_piece, pages.shape[1])) for _ in range(LANES)]
        self._last: list[Mark] = []  # of the batch before

    def follow(self, marks: Sequence[Mark]) -> None:
        for stream, _ in self._lanes:
            for mark in marks:
                stream.follow(mark)

    def follow_main(self) -> None:
        for stream, _ in self._lanes:
            stream.follow_main()

    def run(self, copies: list[PageCopy], work: Callable[[list[PageCopy], Tensor], None]) -> list[Mark]:
        """Enqueue `work` for each piece of `copies`. Return marks behind all of it."""
        self.follow(self._last)
        for turn, at in enumerate(range(0, len(copies), self._per_piece)):
            piece = copies[at : at + self._per_piece]
            stream, staging = self._lanes[turn % LANES]
            stream.run(_bind(work, piece, staging[: len(piece)]))
        self._last = [stream.mark() for stream, _ in self._lanes[: -(-len(copies) // self._per_piece)]]
        return self._last


def _bind(work: Callable[[list[PageCopy], Tensor], None], piece: list[PageCopy], staging: Tensor) -> Callable[[], None]:
    return lambda: work(piece, staging)


def runs(pages: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the first, its page, length) of each run of successive pages."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield start, pages[start], i - start
            start = i
