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
from tests.parallel.test_process_groups import JOIN_S, STAGES, numbers_of


def main() -> None:
    store, folder, prepare = int(sys.argv[1]), Path(sys.argv[2]), die_with_parent()
    forks = multiprocessing.get_context("fork")
    stages = [forks.Process(target=run, args=(store, rank, folder / str(rank), prepare)) for rank in range(STAGES)]
    for stage in stages:
        stage.start()
    for stage in stages:
        stage.join()
    sys.exit(any(stage.exitcode for stage in stages))


def run(store: int, rank: int, file: Path, prepare: Callable[[], None]) -> None:
    """One stage."""
    prepare()
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
