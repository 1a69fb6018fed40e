"""Layout and creation of one machine's shared memory. Never torch.

A plan is numbers, sent as msgpack. Lines have 64 bytes, one writer each.

  | abort | tokens' count | each stage: lines of sums, of gathers | each link: sent, taken |
  | each stage: windows [2, ranks, window] float32 | logits [logits_rows, vocab] float32 |
  | tokens [slots] int64 | each link: slots [depth, link_rows * hidden * 4 bytes] |
  | board: gate, each DP rank: rows posted, vote; rows float64[dp_ranks, BOARD_ROWS, ROW_NUMBERS] |
"""

import fcntl
import os
from dataclasses import dataclass

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
    """The caller closes it."""
    descriptor = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, plan.size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def new_store() -> int:
    """Descriptor of a rendezvous file, which ranks on GPUs inherit and keep open."""
    return os.memfd_create("tandem-store")
