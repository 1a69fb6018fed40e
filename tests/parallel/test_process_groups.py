"""Processes meet in a file that they inherit, with gloo in the place of NCCL; a rank that does not come is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.parallel.layout import Place
from engine.parallel.process_groups import ENVIRONMENT, joined, members
from engine.parallel.region_plan import new_store
from service.flags import ConfigError
from service.process.start import die_with_parent
from tests.parallel.group_process import JOIN_S, STAGES, numbers_of
from tests.parallel.row_process import DP, STEPS, TP, partial_of, rows_of
from tests.parallel.test_sums import one_by_one


def ran(module: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """A module that forks ranks, which meet in a store and write to files of `folder`."""
    store = new_store()
    try:
        return subprocess.run(
            [sys.executable, "-m", module, str(store), str(folder)],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
            timeout=2 * JOIN_S,
            pass_fds=[store],
            preexec_fn=die_with_parent(),
            check=False,
        )
    finally:
        os.close(store)


def test_stages_meet_and_each_reaches_its_neighbours(tmp_path: Path) -> None:
    done = ran("tests.parallel.group_process", tmp_path)
    assert done.returncode == 0, done.stderr
    written = [(tmp_path / str(rank)).read_bytes() for rank in range(STAGES)]
    totals = [sum(map(numbers_of, range(rank + 1)), torch.zeros(3, 40)) for rank in range(STAGES)]
    assert written == [total.numpy().tobytes() for total in totals]


def test_processes_add_each_others_rows_and_end_with_one_of_them(tmp_path: Path) -> None:
    """Bits of the tree over ranks; the death of one is no error of another, but the end of its waits."""
    done = ran("tests.parallel.row_process", tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    for rank in range(TP * DP):
        expected = b""
        for step, tokens in enumerate(STEPS):
            rows = torch.cat([rows_of(dp_rank, step) for dp_rank in range(DP)])
            sums = one_by_one([partial_of(other)(rows) for other in range(TP * DP)], torch.float32)
            first = sum(tokens[: rank // TP])
            expected += sums[first : first + tokens[rank // TP]].view(torch.uint8).numpy().tobytes()
        assert (tmp_path / str(rank)).read_bytes() == expected, rank


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^--tp-size 2, --pp-size 1: this torch has no NCCL"):
        joined(-1, Place(tp_size=2), torch.device("cuda", 0), timeout_s=0.0)


def test_a_small_shm_is_named_with_its_remedy_and_other_errors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NCCL 2.27 says in a container with 64 MB."""
    said = "Error while creating shared memory segment /dev/shm/nccl-kb7GrR (size 33030528), error: No space left on device (28)"

    def fail(*args: object, **how: object) -> None:
        raise torch.distributed.DistBackendError(f"NCCL error\nLast error:\n{said}")

    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
    store = new_store()
    try:
        with pytest.raises(ConfigError, match=r"^/dev/shm: NCCL, .* MiB free there; .* --shm-size 1g"):
            joined(store, Place(), torch.device("cpu"), timeout_s=JOIN_S, backend="gloo")
        said = "unhandled system error"
        with pytest.raises(torch.distributed.DistBackendError):
            joined(store, Place(), torch.device("cpu"), timeout_s=JOIN_S, backend="gloo")
    finally:
        os.close(store)


def test_which_groups_there_are() -> None:
    sizes = ((2, 1, 1), (1, 3, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2))
    places = {size: Place(tp_size=size[0], pp_size=size[1], dp_size=size[2]) for size in sizes}
    assert {size: members(place) for size, place in places.items()} == {
        (2, 1, 1): [(0, 1)],
        (1, 3, 1): [(0, 1), (1, 2)],
        (2, 2, 1): [(0, 1), (2, 3), (0, 2), (1, 3)],
        (1, 1, 2): [(0, 1)],
        (2, 1, 2): [(0, 1), (2, 3), (0, 1, 2, 3), (0, 2), (1, 3)],
    }


def test_ranks_that_do_not_come_are_named() -> None:
    store = new_store()
    try:
        place = Place(tp_rank=1, tp_size=2, pp_size=2)
        with pytest.raises(ConfigError, match=r"^--dist-timeout: ranks 0, 2, 3 of 4 did not meet rank 1 within 0 s"):
            joined(store, place, torch.device("cpu"), timeout_s=0.1, backend="gloo")
    finally:
        os.close(store)
