"""Shared memory of one machine's ranks: a memfd, which cannot collide or be left over.

leader:    region = SharedRegion.create(plan); start followers with its descriptor
follower:  region = SharedRegion.open(descriptor, plan)
"""

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.allreduce import allreduce
from engine.kernels.build import RANKS_ENDED, failure

# ---- Layout and creation of one machine's shared memory. Never torch.
#
# A plan is numbers, sent as msgpack. Lines have 64 bytes, one writer each.
#
#   | abort | tokens' count | each stage: lines of sums, of gathers | each link: sent, taken |
#   | each stage: windows [2, ranks, window] float32 | logits [logits_rows, vocab] float32 |
#   | tokens [slots] int64 | each link: slots [depth, link_rows * hidden * 4 bytes] |
#   | board: gate, each DP rank: rows posted, vote; rows float64[dp_ranks, BOARD_ROWS, ROW_NUMBERS]
# |

LINE_BYTES = 64
FLOAT_BYTES = 4
WINDOW = 131072
MOST_RANKS = 64  # limit of allreduce.c
BOARD_ROWS = 16  # per DP rank (engine/core/dp_agreement.py): 2 * depth + 1 suffice
ROW_NUMBERS = 16


@dataclass(frozen=True, kw_only=True)
class RegionPlan:
    """Sizes of exchanges in one group, equal in all its processes."""

    ranks: int  # of a stage (tp_size)
    stages: int = 1  # pp_size
    logits_rows: int = 0  # maximum rows of a gather, last stage
    vocab: int = 0
    slots: int = 0  # SharedTokens
    hidden: int = 0  # StageLink, with the two below
    link_rows: int = 0
    link_depth: int = 2
    dp_ranks: int = 0  # number that agree on steps by a board (DP attention)
    window: int = WINDOW  # numbers per transfer of a rank

    def __post_init__(self) -> None:
        assert 0 < self.ranks <= MOST_RANKS and self.stages > 0 and self.link_depth > 0, self
        assert self.window > 0 and self.window % 16 == 0, self

    @property
    def abort(self) -> int:
        """Byte offset of the abort word; the rest likewise."""
        return 0

    @property
    def tokens_count(self) -> int:
        return LINE_BYTES

    def sum_lines(self, stage: int) -> int:
        return (2 + 2 * stage * self.ranks) * LINE_BYTES

    def gather_lines(self, stage: int) -> int:
        return self.sum_lines(stage) + self.ranks * LINE_BYTES

    def link_lines(self, stage: int, rank: int) -> int:
        """Two lines: slots sent to the next stage, and taken."""
        assert 0 <= stage < self.stages - 1 and 0 <= rank < self.ranks, (stage, rank)
        return self.sum_lines(self.stages) + 2 * (stage * self.ranks + rank) * LINE_BYTES

    def windows(self, stage: int) -> int:
        lines_end = self.sum_lines(self.stages) + 2 * (self.stages - 1) * self.ranks * LINE_BYTES
        return lines_end + stage * 2 * self.ranks * self.window * FLOAT_BYTES

    @property
    def logits(self) -> int:
        return self.windows(self.stages)

    @property
    def tokens(self) -> int:
        return self.logits + _whole_lines(self.logits_rows * self.vocab * FLOAT_BYTES)

    @property
    def link_bytes(self) -> int:
        return _whole_lines(self.link_rows * self.hidden * FLOAT_BYTES)

    def link_slots(self, stage: int, rank: int) -> int:
        links = self.tokens + _whole_lines(self.slots * 8)
        return links + (stage * self.ranks + rank) * self.link_depth * self.link_bytes

    @property
    def gate(self) -> int:
        return self.link_slots(self.stages - 1, 0)

    def board_lines(self, dp_rank: int) -> int:
        """Two lines: rows posted, and vote."""
        return self.gate + (1 + 2 * dp_rank) * LINE_BYTES

    @property
    def board_rows(self) -> int:
        return self.board_lines(self.dp_ranks)

    @property
    def size(self) -> int:
        return self.board_rows + self.dp_ranks * BOARD_ROWS * ROW_NUMBERS * 8


def _whole_lines(size: int) -> int:
    return -(-size // LINE_BYTES) * LINE_BYTES


def new_memory(plan: RegionPlan) -> int:
    """Return zeroed, unnamed memory of fixed size; the caller closes it."""
    descriptor = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, plan.size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


# ---- region

YIELDS = 50  # in a wait without the C kernel; then it sleeps
# As in allreduce.c:
LONGEST_SLEEP_S = 4e-3
SLEEP_SHARE = 16  # maximum sleep as a share of the wait so far

_fence = threading.Lock()


class SharedRegion:
    """One mapping; only the creator has a `descriptor`, to close. Tensors keep memory alive."""

    def __init__(
        self, memory: mmap.mmap, plan: RegionPlan, *, descriptor: int | None, ends_with: "SharedRegion | None" = None
    ) -> None:
        self.plan = plan
        self.descriptor = descriptor
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self.abort_word: Tensor = self.word(plan.abort) if ends_with is None else ends_with.abort_word
        self._kernels = allreduce()

    @classmethod
    def create(cls, plan: RegionPlan, *, ends_with: "SharedRegion | None" = None) -> "SharedRegion":
        """Create zeroed memory, allocated at the first write; `ends_with` shares its abort word."""
        descriptor = new_memory(plan)
        return cls(mmap.mmap(descriptor, plan.size), plan, descriptor=descriptor, ends_with=ends_with)

    @classmethod
    def open(cls, descriptor: int, plan: RegionPlan, *, ends_with: "SharedRegion | None" = None) -> "SharedRegion":
        """`descriptor` may be closed afterwards. Raises ValueError for another plan's size."""
        size = os.fstat(descriptor).st_size
        if size != plan.size:
            raise ValueError(f"shared memory of ranks has {size} bytes; this plan's has {plan.size}: {plan}")
        return cls(mmap.mmap(descriptor, size), plan, descriptor=None, ends_with=ends_with)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        assert offset + size <= self.plan.size, (offset, shape, dtype)
        return self._memory[offset : offset + size].view(dtype).view(shape)

    def word(self, offset: int) -> Tensor:
        return self.tensor(offset, (1,), torch.int64)

    @property
    def aborted(self) -> bool:
        return bool(self.abort_word.item())

    def abort(self) -> None:
        """End all waits with RanksEnded, now and later."""
        self.abort_word[0] = 1

    def wait(self, word: Tensor, value: int) -> None:
        """Return once `word` is at least `value`, after its writer's earlier writes.

        Raises RanksEnded.
        """
        if self._kernels is not None:
            self._kernels.wait(word.data_ptr(), value, abort=self.abort_word.data_ptr())
            return
        start_s, looks = time.monotonic(), 0
        while int(word.item()) < value:
            if self.aborted:
                raise failure(RANKS_ENDED)
            looks += 1
            waited_s = time.monotonic() - start_s
            time.sleep(0 if looks < YIELDS else min(waited_s / SLEEP_SHARE, LONGEST_SLEEP_S))
        _all_before()

    def read(self, word: Tensor) -> int:
        """Read `word` after its writer's earlier writes."""
        value = int(word.item())
        _all_before()
        return value

    def publish(self, word: Tensor, value: int) -> None:
        """Set `word` after all earlier writes; it has one writer."""
        _all_before()
        word[0] = value

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _all_before() -> None:
    """Fence: a lock taken twice."""
    for _ in range(2):
        with _fence:
            pass


def late_ranks(region: SharedRegion) -> list[int]:
    """Return ranks, by stage, that others wait for; call it after a timeout.

    A computing rank counts, too.
    """
    plan = region.plan
    for stage in reversed(range(plan.stages)):
        first = stage * plan.ranks
        for lines in (plan.sum_lines(stage), plan.gather_lines(stage)):
            counts = region.tensor(lines, (plan.ranks, 8), torch.int64)[:, 0].tolist()
            if behind := [first + i for i, count in enumerate(counts) if count < max(counts)]:
                return behind
        if stage == 0 or any(_waiting(region, stage - 1, rank) for rank in range(plan.ranks)):
            return list(range(first, first + plan.ranks))
    raise AssertionError("the first stage ends the loop")


def ranks_without_row(region: SharedRegion) -> list[int]:
    plan = region.plan
    posted = [region.read(region.word(plan.board_lines(rank))) for rank in range(plan.dp_ranks)]
    return [rank for rank, count in enumerate(posted) if count < max(posted)]


def _waiting(region: SharedRegion, stage: int, rank: int) -> bool:
    sent, taken = region.tensor(region.plan.link_lines(stage, rank), (2, 8), torch.int64)[:, 0].tolist()
    return bool(sent > taken)


# ---- Future map's tokens for other ranks: the leader writes, followers read.


class SharedTokens:
    """Last token per slot (`row` int64), and the leader's `count` of publications.

    `sampled`: sampled steps so far, on a follower. The leader overwrites a slot only after the
    steps that read it: a token needs the step that read the previous one.
    """

    def __init__(self, region: SharedRegion) -> None:
        self._region = region
        self.sampled = 0
        self._count = region.word(region.plan.tokens_count)
        self.row = region.tensor(region.plan.tokens, (region.plan.slots,), torch.int64)

    @property
    def count(self) -> int:
        return int(self._count.item())

    def publish(self, slots: Tensor | Sequence[int], tokens: Tensor | Sequence[int]) -> int:
        """Write tokens; return the new count. Leader only."""
        self.row[torch.as_tensor(slots, dtype=torch.int64)] = torch.as_tensor(tokens, dtype=torch.int64)
        count = self.count + 1
        self._region.publish(self._count, count)
        return count

    def wait(self, count: int) -> None:
        """Raises RanksEnded."""
        self._region.wait(self._count, count)
