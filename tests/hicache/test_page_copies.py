"""Copies on streams of their own: whatever runs first, no page is read before it is there or lost before it is saved."""

import random
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.core.plan import PageCopy
from engine.kv import page_copies
from engine.kv.page_copies import StagedCopies, runs
from tests.hicache.streams_in_a_test import LateStream, MarkInATest, StreamsInATest

NUM_PAGES = 10  # on the device, and as many on the host
WORDS = 4  # of a unit
CUTS = (0, 1, 3, WORDS)  # of three layers
LAYERS = range(len(CUTS) - 1)


def test_runs_of_neighbours_are_found() -> None:
    assert list(runs([4, 5, 6, 2, 9, 10])) == [(0, 4, 3), (3, 2, 1), (4, 9, 2)]
    assert list(runs([])) == []


def staged(device: Tensor, host: Tensor, streams: StreamsInATest, *, units: int = 1) -> StagedCopies:
    return StagedCopies(
        device,
        host,
        layer_cuts=CUTS,
        units=units,
        make_stream=streams.make,
        copy_rows=Tensor.copy_,  # type: ignore[arg-type]
    )


@dataclass
class Step:
    seq: int
    touched: set[int] = field(default_factory=set)  # device pages that its forward reads or writes
    pinned: set[int] = field(default_factory=set)  # host pages
    landed: dict[int, int] = field(default_factory=dict)  # host page -> what it must hold once collected
    loaded: dict[int, int] = field(default_factory=dict)  # device page -> likewise, unless it has another owner then
    end: MarkInATest | None = None


class Story:
    """Random steps as the core plans them, at depth 2. Each page's words are one number, new at each write. Odd seeds: two
    units a page."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams = StreamsInATest(seed)
        self.units = 1 + seed % 2
        self.device = torch.zeros(NUM_PAGES, self.units * WORDS, dtype=torch.int64)
        self.host = torch.zeros(NUM_PAGES, self.units * WORDS, dtype=torch.int64)
        self.copies = staged(self.device, self.host, self.streams, units=self.units)
        self.on_device = [0] * NUM_PAGES  # by the order of plans
        self.on_host = [0] * NUM_PAGES
        self.launched: list[Step] = []
        self.number = 0
        self.num_loads = self.num_overwritten = self.num_late = 0

    def launch(self, seq: int) -> None:
        step = Step(seq)
        busy = set().union(*(s.touched for s in self.launched))
        pinned = set().union(*(s.pinned for s in self.launched))
        out = self.copies_out(pinned)
        leaving = {copy.page for copy in out}
        free = [p for p in range(NUM_PAGES) if p not in busy]
        self.random.shuffle(free)
        back = [PageCopy(free.pop(), self.random.randrange(NUM_PAGES)) for _ in range(self.some(len(free)))]
        written = [free.pop() for _ in range(self.some(len(free)))]
        self.num_loads += len(back)
        self.num_overwritten += len(leaving & {*written, *(c.page for c in back)})
        step.pinned = {copy.host_page for copy in [*out, *back]}
        for copy in out:
            self.on_host[copy.host_page] = step.landed[copy.host_page] = self.on_device[copy.page]
        for copy in back:
            self.on_device[copy.page] = step.loaded[copy.page] = self.on_host[copy.host_page]
        used = [c.page for c in back if self.random.random() < 0.7]  # the others' requests end before a step of theirs
        rest = [c for c in back if c.page not in used]
        self.num_late += len(rest)
        others = [p for p in range(NUM_PAGES) if p not in {*written, *(c.page for c in rest)}]
        reads = {p: self.on_device[p] for p in [*used, self.random.choice(others)]}
        writes = {}
        for page in written:
            self.number += 1
            writes[page] = self.on_device[page] = self.number
        step.touched = {*reads, *writes}
        self.copies.await_loads([*reads, *writes])
        self.copies.save(seq, out)
        arrival = self.copies.load(seq, [c for c in back if c.page in used], by_layer=True)
        self.copies.load(seq, rest, by_layer=False)
        self.copies.guard(written)
        for layer in LAYERS:
            arrival.hold(layer)
            self.streams.main.run(partial(self.forward, layer, reads, writes))
        step.end = self.streams.main.mark()
        self.launched.append(step)

    def copies_out(self, pinned: set[int]) -> list[PageCopy]:
        hosts = [h for h in range(NUM_PAGES) if h not in pinned]
        pages = list(range(NUM_PAGES))
        self.random.shuffle(hosts)
        self.random.shuffle(pages)
        return [PageCopy(pages.pop(), hosts.pop()) for _ in range(self.some(len(hosts)))]

    def some(self, most: int) -> int:
        return self.random.choice([0, 0, self.random.randint(0, min(most, 5))])

    def forward(self, layer: int, reads: dict[int, int], writes: dict[int, int]) -> None:
        words = self.device.view(NUM_PAGES, self.units, WORDS)[:, :, CUTS[layer] : CUTS[layer + 1]]
        for page, number in reads.items():
            assert words[page].unique().tolist() == [number], "read before it was there"
        for page, number in writes.items():
            words[page] = number

    def collect(self) -> None:
        step = self.launched.pop(0)
        assert step.end is not None
        step.end.wait()
        self.copies.wait(step.seq)
        for host_page, number in step.landed.items():
            assert self.host[host_page].unique().tolist() == [number], "lost before it was saved"
        for page, number in step.loaded.items():
            if self.on_device[page] == number:
                assert self.device[page].unique().tolist() == [number], "collected before it was there"


def test_no_order_that_the_streams_allow_mixes_pages_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_copies, "STAGING_BYTES", 2 * WORDS * 8)
    monkeypatch.setattr(page_copies, "MIN_GROUP_BYTES", WORDS * 8)
    overwritten = loads = late = 0
    for seed in range(150):
        story = Story(seed)
        for seq in range(25):
            story.launch(seq)
            story.streams.run_some()
            if len(story.launched) == 2:
                story.collect()
        while story.launched:
            story.collect()
        overwritten, loads = overwritten + story.num_overwritten, loads + story.num_loads
        late += story.num_late
    # Pages with a new owner while they leave, and loads that no step has waited for, or nothing was tested.
    assert overwritten > 300 and loads > 1000 and late > 300


def test_each_lane_has_a_staging_buffer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer reads it while the next piece is gathered."""
    words = torch.zeros(4, WORDS, dtype=torch.int64)
    monkeypatch.setattr(page_copies, "STAGING_BYTES", 0)  # a page at a time
    copies = staged(words, words.clone(), StreamsInATest(0))
    used = list[int]()
    for direction in (copies._out, copies._back):
        for stream, _ in direction._lanes:
            stream.run = lambda work: work()  # type: ignore[method-assign]
        direction.begin()
        direction.run([PageCopy(0, 0), PageCopy(1, 1)], WORDS, lambda _, staging: used.append(staging.data_ptr()))
    assert len(set(used)) == len(used) == 4


def test_loads_do_not_queue_behind_what_leaves() -> None:
    """The forward waits for its own pages, and not for write-through of others."""
    streams = StreamsInATest(0)
    device = torch.arange(4 * WORDS).view(4, WORDS)
    copies = staged(device, torch.zeros(4, WORDS, dtype=torch.int64), streams)
    never = MarkInATest(streams)
    for stream, _ in copies._out._lanes:
        stream.follow(never)
    copies.save(1, [PageCopy(1, 1)])
    copies.load(1, [PageCopy(2, 0)], by_layer=True).hold_all()
    copies.guard([3])
    streams.main.mark().wait()
    assert device[2].tolist() == [0] * WORDS


def test_what_leaves_follows_a_load_that_no_step_has_waited_for() -> None:
    for seed in range(20):
        host = torch.zeros(4, WORDS, dtype=torch.int64)
        host[0] = 7
        copies = staged(torch.zeros(4, WORDS, dtype=torch.int64), host, StreamsInATest(seed))
        copies.load(1, [PageCopy(2, 0)], by_layer=False)
        copies.save(2, [PageCopy(2, 1)])
        copies._leaving[0].marks[0].wait()
        assert host[1].tolist() == [7] * WORDS


@pytest.mark.parametrize(
    ("pages", "layers", "groups"),
    [([0, 1, 2, 3], 3, 3), ([3, 2, 1, 0], 3, 3), ([0, 1], 3, 2), ([0], 3, 1), ([0, 2], 3, 1), ([0, 1, 2, 3], 1, 1)],
)
def test_a_load_is_cut_by_layers_where_the_bus_takes_longer_than_the_host(
    pages: list[int], layers: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not into groups below a least size, nor into more transfers than a bound; backwards neighbours go together."""
    monkeypatch.setattr(page_copies, "MIN_GROUP_BYTES", WORDS * 8)
    monkeypatch.setattr(page_copies, "MAX_TRANSFERS", 3)
    sizes = list[int]()
    words = torch.zeros(5, WORDS, dtype=torch.int64)
    copies = StagedCopies(
        words,
        words.clone(),
        layer_cuts=CUTS if layers > 1 else (0, WORDS),
        make_stream=LateStream,  # type: ignore[arg-type]
        copy_rows=lambda target, source: sizes.append(source.shape[1]),
    )
    copies.load(1, [PageCopy(1 + i, host_page) for i, host_page in enumerate(pages)], by_layer=True).hold_all()
    num_runs = len(list(runs(sorted(pages))))
    assert sum(sizes) == WORDS * num_runs and len(sizes) == groups * num_runs
