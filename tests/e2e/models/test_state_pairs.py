"""Recurrent states cross between workers of different shapes: the tokens of one rank, to the bit, and after retraction too.

Every direction of every shape over real processes: `make rank-shapes`.
"""

from typing import Any

import pytest

from engine.core.mem_cache.state_slots import StateSlots
from engine.kernels.linear import linear_kernel
from tests.e2e.models.group_models import DELTA_RULE, DELTA_RULE_INTERLEAVED, MAMBA2, MAMBA2_SHARED, Made
from tests.e2e.ranks.test_rank_pairs import Cell, both_ways, pair_of
from tests.e2e.two_engines import run
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint

pytestmark = pytest.mark.skipif(linear_kernel() is None, reason="bits are promised of the C kernel of bf16")
FLAGS: dict[str, Any] = {
    "page_size": 16,
    "chunked_prefill_size": 64,
    "kv_units": 2,
    "num_threads": 1,
    "schedule_conservativeness": 0.0,
    "max_total_tokens": 4096,
}
RETRACTS = {"test_retract": 3}  # decode, every third step
EXACT, ROUNDED = {"dtype": "bfloat16", "reduce_units": 4}, {"dtype": "float32"}
SHARED = prompt_of(70, 9)
ASKED = [(f"r{i}", [*SHARED, *prompt_of(30 + 9 * i, i)], 36 - 4 * i) for i in range(4)]
Right = tuple[str, dict[str, list[int]]]  # a checkpoint, and its tokens


CELLS = [
    *both_ways("delta rule", DELTA_RULE, (2, 1), (4, 1)),
    *both_ways("delta rule", DELTA_RULE_INTERLEAVED, (4, 1), (1, 2)),
    *both_ways("Mamba2", MAMBA2, (1, 1), (2, 1)),
    *both_ways("Mamba2", MAMBA2_SHARED, (2, 1), (1, 2)),
]


@pytest.fixture(scope="module")
def rights() -> dict[str, Right]:
    """By family, as tests ask for them."""
    return {}


@pytest.mark.parametrize(("made", "cell"), CELLS)
def test_states_cross_between_all_ranks(
    made: Made, cell: Cell, rights: dict[str, Right], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In bf16 to the bit. What is retracted is computed again as a prompt, which rounds otherwise: in fp32."""
    family, fields = made
    exact = (1, 2) in (cell.prefill, cell.decode)
    flags: dict[str, Any] = {**FLAGS, **(EXACT if exact else ROUNDED)}
    if family not in rights:
        path = make_tiny_checkpoint(tmp_path_factory.mktemp(family), family, dtype=flags["dtype"], **fields)
        rights[family] = (path, _right(path, flags))
    path, right = rights[family]
    with pair_of(cell, path, flags=flags, decode={} if exact else RETRACTS) as pair:
        assert run(pair, ASKED, turns_between=6) == right
        for worker in pair.workers:
            scheduler = worker.parts.scheduler
            scheduler.check()
            states = scheduler.memory.part(StateSlots)
            assert states is not None and states.allocator.counts()["held"] == 0
        assert (pair.workers[1].parts.scheduler.counters.retractions > 0) != exact
        sent, received = (worker.role.counters() for worker in pair.workers)
        assert received["kv_checksum_verified"] == sent["kv_transfers"] >= len(ASKED)
        assert (sent.get("posts_of_followers", 0) > 0) == (cell.prefill != (1, 1))


def _right(path: str, flags: dict[str, Any]) -> dict[str, list[int]]:
    with EngineInProcess(path, **{**flags, "chunked_prefill_size": -1, "disable_radix_cache": True}) as engine:
        for rid, prompt, new in ASKED:
            engine.add(rid, prompt, max_new_tokens=new, ignore_eos=True)
        engine.run()
        return dict(engine.tokens)
