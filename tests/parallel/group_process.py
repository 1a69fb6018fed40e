"""Run by test_process_groups.py: three stages, forked from this process, which has imported torch.

Each adds its numbers to those of the stage before, and writes the bytes to a file of its rank.
"""

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from engine.parallel.layout import Place
from engine.parallel.process_groups import joined
from engine.parallel.stage_link import GroupLink
from service.process.start import die_with_parent

JOIN_S = 60.0
STAGES = 3


def numbers_of(rank: int) -> torch.Tensor:
    return torch.randn((3, 40), generator=torch.Generator().manual_seed(rank))


def main() -> None:
    sys.exit(any(forked(STAGES, run)))


def forked(count: int, run: Callable[[int, int, Path], None]) -> list[int | None]:
    """Exit codes of `run(store, rank, file)`, by rank, of the store and folder of the command line."""
    store, folder, prepare = int(sys.argv[1]), Path(sys.argv[2]), die_with_parent()

    def guarded(rank: int) -> None:
        prepare()
        run(store, rank, folder / str(rank))

    ranks = [multiprocessing.get_context("fork").Process(target=guarded, args=(rank,)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]


def run(store: int, rank: int, file: Path) -> None:
    """One stage."""
    device = torch.device("cpu")
    groups = joined(store, Place(pp_rank=rank, pp_size=STAGES), device, timeout_s=JOIN_S, backend="gloo")
    assert groups.stage is None and groups.memory is None
    numbers = numbers_of(rank)
    if groups.before is not None:
        numbers += GroupLink(groups.before, hidden=40, dtype=torch.float32, device=device).receive(3)
    if groups.after is not None:
        GroupLink(groups.after, hidden=40, dtype=torch.float32, device=device).send(numbers)
    file.write_bytes(numbers.numpy().tobytes())


if __name__ == "__main__":
    main()
