"""Two-batch overlap of real processes: a pair whose ranks compute each step in halves, and what ranks measure at start."""

import json
from pathlib import Path

import pytest

from engine.kernels.linear import linear_kernel
from tests.e2e.client import assert_all_back, generate_all, text_of
from tests.e2e.cluster import cluster, tandem
from tests.e2e.workload import mixed_bodies
from tests.engine.engine_in_process import tokens_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint

SIZES = ("--tp-size", "2", "--ep-size", "2")
FLAGS = (
    "--dtype",
    "bfloat16",
    "--max-total-tokens",
    "16384",
    "--chunked-prefill-size",
    "128",
    "--log-level",
    "warning",
)


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    return make_tiny_checkpoint(tmp_path / "mixture", "qwen3_moe", dtype="bfloat16")


@pytest.mark.skipif(linear_kernel() is None, reason="bits are promised of the C kernel of bf16")
async def test_a_pair_in_halves_answers_as_one_rank_does(mixture: str, tmp_path: Path) -> None:
    """Attention is cut over prefill's ranks; each of decode's has requests of its own."""
    bodies = mixed_bodies(seed=1, count=16)
    expected = tokens_of(mixture, bodies, dtype="bfloat16", reduce_units=2, max_total_tokens=16384)
    shape = (*SIZES, "--decode-dp-size", "2", "--enable-dp-attention", "--reduce-units", "2", "--kv-units", "2")
    flags = ("--model-path", mixture, *shape, *FLAGS, "--enable-two-batch-overlap", "on")
    with cluster(tmp_path, *flags, "--transfer-backend", "nixl") as up:
        answers = await generate_all(up.router, bodies)
        assert [answer["output_ids"] for answer in answers] == expected
        for worker in (*up.of("prefill"), *up.of("decode")):
            assert json.loads(await text_of(f"{worker.url}/server_info"))["two_batch_overlap"] == "on"
        await assert_all_back(up)


async def test_dp_ranks_measure_both_forms_at_start(mixture: str, tmp_path: Path) -> None:
    """The flag alone measures, as SGLang's is given."""
    shape = (*SIZES, "--dp-size", "2", "--enable-dp-attention", "--max-running-requests", "8")
    flags = ("--model-path", mixture, *shape, *FLAGS, "--port", "0", "--enable-two-batch-overlap")
    with tandem(tmp_path, "serve", *flags) as worker:
        found = json.loads(await text_of(f"{worker.url}/server_info"))
        assert found["two_batch_overlap"] == "auto" and found["two_batch_decodes_from"] in (0, 2, 8)
        assert all(f"decode steps of {rows} rows: " in found["two_batch_times"] for rows in (2, 8))
        assert all(
            len(answer["output_ids"]) for answer in await generate_all(worker.url, mixed_bodies(seed=2, count=4))
        )
