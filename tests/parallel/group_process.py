"""Run by test_process_groups.py: one of three stages. Adds its numbers to those of the stage before, and prints the bytes."""

import sys

import torch

from engine.parallel.layout import Place
from engine.parallel.process_groups import joined
from engine.parallel.stage_link import GroupLink
from tests.parallel.test_process_groups import JOIN_S, STAGES, numbers_of


def main() -> None:
    store, rank = map(int, sys.argv[1:])
    device = torch.device("cpu")
    groups = joined(store, Place(pp_rank=rank, pp_size=STAGES), device, timeout_s=JOIN_S, backend="gloo")
    assert groups.stage is None and groups.memory is None
    numbers = numbers_of(rank)
    if groups.before is not None:
        numbers += GroupLink(groups.before, hidden=40, dtype=torch.float32, device=device).receive(3)
    if groups.after is not None:
        GroupLink(groups.after, hidden=40, dtype=torch.float32, device=device).send(numbers)
    print(numbers.numpy().tobytes().hex())


if __name__ == "__main__":
    main()
