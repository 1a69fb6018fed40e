"""Copies between device and host pages, in plan order.

DirectCopies   synchronous, page by page (CPU pools)
StagedCopies   on side streams, concurrent with the forward (GPUs)
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Protocol, Self

import torch
from torch import Tensor

from engine.core.plan import PageCopy
from engine.kv.step_batch import upload

# ---- Streams next to the main one, concurrent unless ordered by marks. Only `Mark.wait` blocks.


class Mark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def hold_main(self) -> None:
        """Order later main stream work after it."""
        torch.cuda.current_stream().wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


class SideStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Mark:
        return Mark(self._stream)

    def follow(self, mark: Mark) -> None:
        """Order later work here after `mark`."""
        self._stream.wait_event(mark.event)

    def follow_main(self) -> None:
        """Order later work here after the main stream's."""
        self._stream.wait_stream(torch.cuda.current_stream())


# ---- Pages being loaded from the host by layer group: the main stream waits for each before use.

Group = tuple[int, Sequence[Mark]]  # (first layer, marks after the copies of the group)


class Arrival:
    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self._ahead = deque(groups)

    @property
    def is_held(self) -> bool:
        return not self._ahead

    def hold(self, layer: int) -> None:
        """Order later main stream work after the copies up to `layer`."""
        while self._ahead and self._ahead[0][0] <= layer:
            self._hold_next()

    def hold_all(self) -> None:
        while self._ahead:
            self._hold_next()

    def _hold_next(self) -> None:
        for mark in self._ahead.popleft()[1]:
            mark.hold_main()


# ---- Groups of layers copied together, in all units of a page.


def equal_groups(num_layers: int, count: int) -> list[int]:
    assert 1 <= count <= num_layers, (count, num_layers)
    return [num_layers * (i + 1) // count for i in range(count)]


def word_cuts(layer_ends: Sequence[int], word_bytes: int) -> list[int]:
    """Layer starts and the end in words; a word across layers is the first's."""
    return [0, *(-(-end // word_bytes) for end in layer_ends)]


LIBRARY = "libcuda.so.1"
HOST, DEVICE = 1, 2  # CUmemorytype


class _Copy2D(ctypes.Structure):
    _fields_ = [
        ("src_x_bytes", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_void_p),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x_bytes", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_void_p),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class CudaRows:
    """Copies strided host rows to the GPU in one operation (cuMemcpy2DAsync).

    torch would gather them on the host first. Raises OSError without a CUDA driver.
    """

    def __init__(self, *, library: str = LIBRARY) -> None:
        self._copy_2d = ctypes.CDLL(library).cuMemcpy2DAsync_v2
        self._copy_2d.argtypes = [ctypes.POINTER(_Copy2D), ctypes.c_void_p]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue pinned `source` to GPU `target`, [rows, words]."""
        self.copy_on(torch.cuda.current_stream().cuda_stream, target, source)

    def copy_on(self, stream: int, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype
        assert target.stride(1) == source.stride(1) == 1
        size = source.element_size()
        copy = _Copy2D(
            src_type=HOST,
            src_host=source.data_ptr(),
            src_pitch=source.stride(0) * size,
            dst_type=DEVICE,
            dst_device=target.data_ptr(),
            dst_pitch=target.stride(0) * size,
            width_bytes=source.shape[1] * size,
            height=source.shape[0],
        )
        status = self._copy_2d(ctypes.byref(copy), stream)
        if status != 0:
            raise RuntimeError(f"host tier: cuMemcpy2DAsync failed with CUDA error {status}")


STAGING_BYTES = 32 << 20  # of device memory per stream besides the pool
LANES = 2  # per direction: one gathers or scatters while the other uses the bus
MIN_GROUP_BYTES = 1 << 20  # minimum per layer group: less crosses the bus faster than its launch
MAX_TRANSFERS = 1024  # per layerwise load: launching them takes the host some milliseconds

CopyRows = Callable[[Tensor, Tensor], None]  # (target, source) [rows, words]: enqueue a copy on the current stream


class PageCopies(Protocol):
    """Copies of pages int64[pages, page_bytes / 8]. For both ways in one step, save first."""

    def save(self, seq: int, copies: list[PageCopy]) -> None:
        """Copy the main stream's writes so far to the host."""

    def load(self, seq: int, copies: list[PageCopy], *, by_layer: bool) -> Arrival:
        """Copy from the host; hold the arrival before using the pages."""

    def await_loads(self, pages: Iterable[int]) -> None:
        """Order the main stream after all loads into `pages`."""

    def guard(self, pages: Iterable[int]) -> None:
        """Order the main stream's writes after saves of `pages`."""

    def wait(self, seq: int) -> None:
        """Block until copies of steps up to `seq` have landed."""


class DirectCopies(PageCopies):
    def __init__(self, device_pages: Tensor, host_pages: Tensor) -> None:
        self._device_pages = device_pages
        self._host_pages = host_pages

    def save(self, seq: int, copies: list[PageCopy]) -> None:
        for copy in copies:
            self._host_pages[copy.host_page].copy_(self._device_pages[copy.page])

    def load(self, seq: int, copies: list[PageCopy], *, by_layer: bool) -> Arrival:
        for copy in copies:
            self._device_pages[copy.page].copy_(self._host_pages[copy.host_page])
        return Arrival()


@dataclass(frozen=True, slots=True)
class _UnderWay:
    seq: int
    pages: frozenset[int]
    host_pages: frozenset[int]
    marks: Sequence[Mark]
    arrival: Arrival

    @classmethod
    def of(cls, seq: int, copies: Sequence[PageCopy], marks: Sequence[Mark], arrival: Arrival) -> Self:
        pages, host_pages = frozenset(c.page for c in copies), frozenset(c.host_page for c in copies)
        return cls(seq, pages, host_pages, marks, arrival)

    def touches(self, copies: Iterable[PageCopy]) -> bool:
        return any(c.page in self.pages or c.host_page in self.host_pages for c in copies)


@dataclass(eq=False)
class StagedCopies:
    """Copies by a device gather or scatter, and one transfer per run of host pages.

    Two directions, so that loads never queue after write-through:

      out     after the main stream's work at planning, and after loads of the same page
      main    after a held load (Arrival); overwrites a page after its save (`guard`)
      back    after saves of the same page; free pages have no step in flight
      batch   after the previous batch of its direction

    Layerwise loads transfer columns. Host pages must not change until their step is collected,
    which calls `wait`. `layer_cuts`: starts of layers and end in words of a unit.
    """

    device_pages: Tensor
    host_pages: Tensor
    _: KW_ONLY
    layer_cuts: InitVar[Sequence[int]]
    units: int = 1
    make_stream: InitVar[Callable[[], SideStream]]
    copy_rows: CopyRows

    def __post_init__(self, layer_cuts: Sequence[int], make_stream: Callable[[], SideStream]) -> None:
        self._layer_cuts = list(layer_cuts)
        self._page_words = self.device_pages.shape[1]
        self._out = _Direction(self.device_pages, make_stream)
        self._back = _Direction(self.device_pages, make_stream)
        self._leaving: deque[_UnderWay] = deque()
        self._coming: deque[_UnderWay] = deque()

    def save(self, seq: int, copies: list[PageCopy]) -> None:
        if not copies:
            return
        self._out.follow_main()
        for coming in self._coming:
            if coming.touches(copies):
                self._out.follow(coming.marks)
        self._out.begin()
        self._out.run(copies, self._page_words, self._copy_out)
        self._leaving.append(_UnderWay.of(seq, copies, self._out.end(), Arrival()))

    def load(self, seq: int, copies: list[PageCopy], *, by_layer: bool) -> Arrival:
        if not copies:
            return Arrival()
        # Chains are evicted from their ends, so the next chain's pages are adjacent in reverse.
        copies = sorted(copies, key=lambda c: c.host_page)
        for leaving in self._leaving:
            if leaving.touches(copies):
                self._back.follow(leaving.marks)
        self._back.begin()
        arrival = Arrival(list(self._groups(copies, self._num_groups(copies) if by_layer else 1)))
        self._coming.append(_UnderWay.of(seq, copies, self._back.end(), arrival))
        return arrival

    def _num_groups(self, copies: list[PageCopy]) -> int:
        size_bytes = len(copies) * self._page_words * self.device_pages.element_size()
        num_runs = sum(1 for _ in runs([c.host_page for c in copies]))
        num_layers = len(self._layer_cuts) - 1
        return max(1, min(num_layers, size_bytes // MIN_GROUP_BYTES, MAX_TRANSFERS // num_runs))

    def _groups(self, copies: list[PageCopy], count: int) -> Iterator[Group]:
        first = 0
        for end in equal_groups(len(self._layer_cuts) - 1, count):
            begin_word, end_word = self._layer_cuts[first], self._layer_cuts[end]
            work = partial(self._copy_back, words=slice(begin_word, end_word))
            yield first, self._back.run(copies, self.units * (end_word - begin_word), work)
            first = end

    def await_loads(self, pages: Iterable[int]) -> None:
        ahead = [coming for coming in self._coming if not coming.arrival.is_held]
        if not ahead:
            return
        touched = frozenset(pages)
        for coming in ahead:
            if not touched.isdisjoint(coming.pages):
                coming.arrival.hold_all()

    def guard(self, pages: Iterable[int]) -> None:
        if not self._leaving:
            return
        written = frozenset(pages)
        for leaving in self._leaving:
            if not written.isdisjoint(leaving.pages):
                for mark in leaving.marks:
                    mark.hold_main()

    def wait(self, seq: int) -> None:
        for under_way in (self._leaving, self._coming):
            while under_way and under_way[0].seq <= seq:
                for mark in under_way.popleft().marks:
                    mark.wait()

    def _copy_out(self, copies: list[PageCopy], staging: Tensor) -> None:
        torch.index_select(self.device_pages, 0, self._index(copies), out=staging)
        for at, host_page, n in runs([c.host_page for c in copies]):
            self.host_pages[host_page : host_page + n].copy_(staging[at : at + n], non_blocking=True)

    def _copy_back(self, copies: list[PageCopy], staging: Tensor, *, words: slice) -> None:
        units = self.units
        host, parts = self.host_pages.view(-1, self._page_words // units), staging.view(len(copies) * units, -1)
        for at, host_page, n in runs([c.host_page for c in copies]):
            self.copy_rows(
                parts[at * units : (at + n) * units], host[host_page * units : (host_page + n) * units, words]
            )
        device = self.device_pages.view(len(self.device_pages), units, -1)
        device[:, :, words][self._index(copies)] = parts.view(len(copies), units, -1)

    def _index(self, copies: list[PageCopy]) -> Tensor:
        return upload(torch.tensor([c.page for c in copies], dtype=torch.int64), self.device_pages.device)


Work = Callable[[list[PageCopy], Tensor], None]  # (copies, staging [copies, words])


class _Direction:
    """Round-robin streams, each with a staging buffer protected by stream order."""

    def __init__(self, pages: Tensor, make_stream: Callable[[], SideStream]) -> None:
        words = max(pages.shape[1], STAGING_BYTES // pages.element_size())
        self._lanes = [(make_stream(), pages.new_empty(words)) for _ in range(LANES)]
        self._turn = 0
        self._last: dict[int, Mark] = {}  # of the previous batch, by stream
        self._now: dict[int, Mark] = {}

    def follow(self, marks: Iterable[Mark]) -> None:
        for mark in marks:
            for stream, _ in self._lanes:
                stream.follow(mark)

    def follow_main(self) -> None:
        for stream, _ in self._lanes:
            stream.follow_main()

    def begin(self) -> None:
        self.follow(self._last.values())
        self._turn, self._now = 0, {}

    def run(self, copies: list[PageCopy], num_words: int, work: Work) -> list[Mark]:
        used: dict[int, SideStream] = {}
        for piece, lane in self._pieces(copies, num_words):
            stream, staging = self._lanes[lane]
            stream.run(partial(work, piece, staging[: len(piece) * num_words].view(-1, num_words)))
            used[lane] = stream
        marks = {lane: stream.mark() for lane, stream in used.items()}
        self._now |= marks
        return list(marks.values())

    def end(self) -> list[Mark]:
        self._last = self._now
        return list(self._last.values())

    def _pieces(self, copies: list[PageCopy], num_words: int) -> Iterator[tuple[list[PageCopy], int]]:
        per_piece = self._lanes[0][1].numel() // num_words
        for at in range(0, len(copies), per_piece):
            yield copies[at : at + per_piece], self._turn
            self._turn = (self._turn + 1) % LANES


def runs(pages: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index, page, length) of runs of successive pages."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield start, pages[start], i - start
            start = i
