"""Copies on streams of their own: whatever runs first, no page is read before it is there or lost before it is saved."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from engine.core.plan import PageCopy
from engine.kv import page_copies
from engine.kv.page_copies import StagedCopies, runs
from tests.hicache.streams_in_a_test import MarkInATest, StreamsInATest

NUM_PAGES = 10  # on the device, and as many on the host
WORDS = 4


def test_runs_of_neighbours_are_found() -> None:
    assert list(runs([4, 5, 6, 2, 9, 10])) == [(0, 4, 3), (3, 2, 1), (4, 9, 2)]
    assert list(runs([])) == []


@dataclass
class Step:
    seq: int
    touched: set[int] = field(default_factory=set)  # device pages that its forward reads or writes
    pinned: set[int] = field(default_factory=set)  # host pages
    landed: dict[int, int] = field(default_factory=dict)  # host page -> what it must hold once collected
    end: MarkInATest | None = None


class Story:
    """Random steps as the core plans them, at depth 2. Each page's words are one number, new at each write."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams = StreamsInATest(seed)
        self.device = torch.zeros(NUM_PAGES, WORDS, dtype=torch.int64)
        self.host = torch.zeros(NUM_PAGES, WORDS, dtype=torch.int64)
        self.copies = StagedCopies(self.device, self.host, make_stream=self.streams.make)  # type: ignore[arg-type]
        self.on_device = [0] * NUM_PAGES  # by the order of plans
        self.on_host = [0] * NUM_PAGES
        self.launched: list[Step] = []
        self.number = 0
        self.num_loads = self.num_overwritten = 0

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
            self.on_device[copy.page] = self.on_host[copy.host_page]
        used = [c.page for c in back if self.random.random() < 0.7]  # the others' requests end before a step of theirs
        reads = {p: self.on_device[p] for p in [*used, self.random.randrange(NUM_PAGES)]}
        writes = {}
        for page in written:
            self.number += 1
            writes[page] = self.on_device[page] = self.number
        step.touched = {*reads, *writes}
        self.copies.run(seq, out=out, back=back)
        self.copies.guard(written)
        self.streams.main.run(lambda: self.forward({p: n for p, n in reads.items() if p not in writes}, writes))
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

    def forward(self, reads: dict[int, int], writes: dict[int, int]) -> None:
        for page, number in reads.items():
            assert self.device[page].tolist() == [number] * WORDS, "read before it was there"
        for page, number in writes.items():
            self.device[page] = number

    def collect(self) -> None:
        step = self.launched.pop(0)
        assert step.end is not None
        step.end.wait()
        self.copies.wait(step.seq)
        for host_page, number in step.landed.items():
            assert self.host[host_page].tolist() == [number] * WORDS, "lost before it was saved"


def test_no_order_that_the_streams_allow_mixes_pages_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_copies, "STAGING_BYTES", 2 * WORDS * 8)
    overwritten = loads = 0
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
    assert overwritten > 300 and loads > 1000  # pages with a new owner while they leave, or nothing was tested


def test_each_lane_has_a_staging_buffer_of_its_own() -> None:
    """A transfer reads it while the next piece is gathered."""
    words = torch.zeros(4, WORDS, dtype=torch.int64)
    copies = StagedCopies(words, words.clone(), make_stream=StreamsInATest(0).make)  # type: ignore[arg-type]
    used = list[int]()
    for direction in (copies._out, copies._back):
        lanes = direction._lanes
        direction._per_piece = 1
        for stream, _ in lanes:
            stream.run = lambda work: work()  # type: ignore[method-assign]
        direction.run([PageCopy(0, 0), PageCopy(1, 1)], lambda _, staging: used.append(staging.data_ptr()))
    assert len(set(used)) == len(used) == 4


def test_loads_do_not_queue_behind_what_leaves() -> None:
    """The forward waits for its own pages, and not for write-through of others."""
    streams = StreamsInATest(0)
    device = torch.arange(4 * WORDS).view(4, WORDS)
    copies = StagedCopies(device, torch.zeros(4, WORDS, dtype=torch.int64), make_stream=streams.make)  # type: ignore[arg-type]
    never = MarkInATest(streams)
    for stream, _ in copies._out._lanes:
        stream.follow(never)
    copies.run(1, out=[PageCopy(1, 1)], back=[PageCopy(2, 0)])
    copies.guard([3])
    streams.main.mark().wait()
    assert device[2].tolist() == [0] * WORDS
