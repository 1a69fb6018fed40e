"""Run by test_processes.py: rank 1 of two. Prints the bytes of a sum, then waits for hidden states that never come."""

import sys

import msgspec
import torch

from engine.parallel.collectives import SharedMemoryCollectives
from engine.parallel.region import SharedRegion
from engine.parallel.region_plan import RegionPlan
from engine.parallel.stage_link import StageLink
from tests.parallel.test_processes import partial_of


def main() -> None:
    plan = msgspec.json.decode(sys.argv[2], type=RegionPlan)
    region = SharedRegion.open(int(sys.argv[1]), plan)
    rank = SharedMemoryCollectives(region, rank=1)
    total = rank.sum(partial_of(1), dtype=torch.bfloat16)
    rank.gather_columns(partial_of(1), columns=range(40, 80), total=80)
    print(total.view(torch.uint8).numpy().tobytes().hex(), flush=True)
    StageLink(region, stage=0, rank=1, dtype=torch.bfloat16).receive(1)


if __name__ == "__main__":
    main()
