"""Pages of windows in a pool of their own on several ranks: the tokens of one rank that keeps all KV, between workers of any TP, too.

Every direction of every shape over real processes: `make rank-shapes`.
"""

from pathlib import Path
from typing import Any

import pytest

from engine.core.mem_cache.window_pages import WindowPages
from engine.core.scheduler import Scheduler
from tests.e2e.models.group_models import ALL_WINDOWS, SOME_WINDOWS, Made
from tests.e2e.ranks.test_rank_pairs import Cell, both_ways, pair_of
from tests.e2e.two_engines import run
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import ranks
from tests.models.tiny_checkpoints import make_tiny_checkpoint

FLAGS: dict[str, Any] = {
    "page_size": 4,
    "chunked_prefill_size": 32,
    "kv_units": 2,
    "num_threads": 1,
    "max_total_tokens": 2048,
    "dtype": "float32",
}
CELLS = [
    *both_ways("some layers", SOME_WINDOWS, (2, 1), (2, 1)),
    *both_ways("some layers", SOME_WINDOWS, (1, 1), (4, 1)),
    *both_ways("all layers", ALL_WINDOWS, (2, 1), (1, 1)),
]
ASKED = [(f"r{i}", [*prompt_of(40, 9), *prompt_of(20 + 7 * i, i)], 40) for i in range(4)]


def right_of(path: str) -> dict[str, list[int]]:
    alone = {**FLAGS, "chunked_prefill_size": -1, "disable_radix_cache": True, "disable_hybrid_swa_memory": True}
    with EngineInProcess(path, **alone) as engine:
        return asked_of(engine)


def asked_of(engine: EngineInProcess) -> dict[str, list[int]]:
    for rid, prompt, new in ASKED:
        engine.add(rid, prompt, max_new_tokens=new, ignore_eos=True)
    engine.run()
    return dict(engine.tokens)


def check_all_is_back(scheduler: Scheduler) -> None:
    windows = scheduler.memory.part(WindowPages)
    assert windows is not None and windows.num_retired > 0
    assert windows.num_available == windows.allocator.num_pages


def test_two_ranks_free_what_lies_behind_the_window(tmp_path: Path) -> None:
    family, fields = SOME_WINDOWS
    path = make_tiny_checkpoint(tmp_path, family, **fields)
    with ranks(path, tp_size=2, **FLAGS) as group:
        assert asked_of(group.engine) == right_of(path)
        check_all_is_back(group.engine.parts.scheduler)


@pytest.mark.parametrize(("made", "cell"), CELLS)
def test_windows_cross_between_ranks(made: Made, cell: Cell, tmp_path: Path) -> None:
    family, fields = made
    path = make_tiny_checkpoint(tmp_path, family, **fields)
    with pair_of(cell, path, flags=FLAGS, decode={"test_retract": 3}) as pair:
        assert run(pair, ASKED, turns_between=6) == right_of(path)
        for worker in pair.workers:
            check_all_is_back(worker.parts.scheduler)
        assert pair.workers[1].parts.scheduler.counters.retractions > 0
        sent, received = (worker.role.counters() for worker in pair.workers)
        assert received["kv_checksum_verified"] == sent["kv_transfers"] >= len(ASKED)
