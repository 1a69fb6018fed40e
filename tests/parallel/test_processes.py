"""Two real processes over a memory that one of them inherited; one is killed, and the other's wait ends by the abort word."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from engine.kernels.build import RanksEnded
from engine.parallel.collectives import SharedMemoryCollectives
from engine.parallel.region import SharedRegion
from engine.parallel.region_plan import RegionPlan
from service.process.start import die_with_parent

PLAN = RegionPlan(ranks=2, stages=2, hidden=40, link_rows=1, logits_rows=3, vocab=80, window=64)


def partial_of(rank: int) -> torch.Tensor:
    return torch.randn((3, 40), generator=torch.Generator().manual_seed(rank))


def test_processes_add_and_one_that_is_killed_keeps_no_other_waiting() -> None:
    region = SharedRegion.create(PLAN)
    assert region.descriptor is not None
    plan = msgspec.json.encode(PLAN).decode()
    follower = subprocess.Popen(
        [sys.executable, "-m", "tests.parallel.rank_process", str(region.descriptor), plan],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[region.descriptor],
        preexec_fn=die_with_parent(),
    )
    region.close()  # the follower has its own
    watcher = threading.Thread(target=lambda: (follower.wait(), region.abort()))
    watcher.start()
    try:
        leader = SharedMemoryCollectives(region, rank=0)
        total = leader.sum(partial_of(0), dtype=torch.bfloat16)
        whole = leader.gather_columns(partial_of(0), columns=range(40), total=80)
        assert whole is not None and torch.equal(whole, torch.cat([partial_of(0), partial_of(1)], 1))
        assert torch.equal(total, (partial_of(0) + partial_of(1)).to(torch.bfloat16))
        assert follower.stdout is not None
        assert follower.stdout.readline().strip() == total.view(torch.uint8).numpy().tobytes().hex()
        follower.kill()
        with pytest.raises(RanksEnded):
            leader.sum(partial_of(0), dtype=torch.bfloat16)
    finally:
        follower.kill()
        watcher.join()
        follower.communicate()  # closes its pipe
    assert not [name for name in os.listdir("/dev/shm") if "tandem-ranks" in name]


def test_a_region_of_another_plan_is_refused() -> None:
    region = SharedRegion.create(PLAN)
    assert region.descriptor is not None
    try:
        with pytest.raises(ValueError, match=f"has {PLAN.size} bytes; this plan's has"):
            SharedRegion.open(region.descriptor, RegionPlan(ranks=3))
        with pytest.raises(PermissionError):
            os.ftruncate(region.descriptor, 64)  # sealed: a rank cannot take memory from under the others
    finally:
        region.close()


def test_a_plan_travels_as_msgpack() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(PLAN), type=RegionPlan) == PLAN
