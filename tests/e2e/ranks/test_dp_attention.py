"""DP attention of real processes: answers, other weights, and the end or stop of any rank; the same between two workers.

The models have random weights: the shipped ones have MLPs of zeros.
"""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.client import assert_all_back, generate, generate_all, post, session, state_of, text_of, wait_for_state
from tests.e2e.cluster import Started, cluster, tandem, wait_until
from tests.e2e.ranks.test_ranks import processes
from tests.e2e.workload import mixed_bodies
from tests.engine.engine_in_process import tokens_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint

WITHIN_S = 10.0
STEPS = ("--chunked-prefill-size", "128", "--log-level", "warning")
FLAGS = ("--max-total-tokens", "32768", *STEPS)
DP = ("--enable-dp-attention", "--dp-size", "2")
LONG = {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}


def references(model: str) -> list[list[int]]:
    return tokens_of(model, mixed_bodies(seed=1, count=16), depth=1, max_total_tokens=32768)


async def pids_of(worker: Started) -> list[int]:
    info = json.loads(await text_of(f"{worker.url}/server_info"))
    assert (info["tp_size"], info["dp_size"]) == (4, 2)
    pids: list[int] = info["rank_pids"]
    assert set(pids) <= {process.pid for process in processes(worker)} and len(pids) == 4
    return pids


async def test_it_answers_takes_other_weights_and_ends_with_any_of_its_ranks(qwen3: str, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", "qwen3", seed=1)
    flags = (
        "--model-path",
        qwen3,
        "--tp-size",
        "4",
        "--enable-prefill-delayer",
        "--port",
        "0",
        *DP,
        *STEPS,
    )  # and measures
    with tandem(tmp_path, "serve", *flags) as worker:
        answers = await generate_all(worker.url, mixed_bodies(seed=1, count=16))
        assert [answer["output_ids"] for answer in answers] == references(qwen3)
        state = await state_of(worker.url)
        assert all(rank["counters"]["prompt_tokens"] > 0 for rank in state["ranks"])
        assert all(rank["counters"]["joined_steps"] > 0 for rank in state["ranks"])

        async with session() as http:
            for rank in range(2):  # one of them has nothing to drain, and waits for the other
                body = {"input_ids": [20, 21, 22], "sampling_params": {**LONG, "max_new_tokens": 300}}
                running = asyncio.create_task(generate(http, worker.url, {**body, "routed_dp_rank": rank}))
                await wait_for_state(worker.url, lambda state, rank=rank: state["ranks"][rank]["running"] == 1)
                update = {"model_path": (other, qwen3)[rank], "weight_version": f"v{rank}"}
                assert (await post(http, f"{worker.url}/update_weights_from_disk", update))[0] == 200
                assert (await running)["meta_info"]["completion_tokens"] == 300
                answers = await generate_all(worker.url, mixed_bodies(seed=1, count=16))
                assert [answer["output_ids"] for answer in answers] == references((other, qwen3)[rank])

        await _dies_by_name(worker)


async def _dies_by_name(worker: Started) -> None:
    """A rank without requests dies while another's request is computed."""
    pids, family = await pids_of(worker), processes(worker)
    async with session() as http:
        body = {"input_ids": [20, 21, 22], "sampling_params": LONG, "routed_dp_rank": 0}
        running = asyncio.create_task(generate(http, worker.url, body))
        await wait_for_state(worker.url, lambda state: state["ranks"][0]["running"] == 1)
        psutil.Process(pids[3]).send_signal(signal.SIGKILL)
        wait_until(lambda: worker.process.poll() is not None, within_s=WITHIN_S, what="the end of the worker")
        await asyncio.gather(running, return_exceptions=True)
    _, left = psutil.wait_procs(family, timeout=WITHIN_S)
    assert not left, left
    log = worker.log.read_text()
    assert f"rank 3 of 4 (pid {pids[3]}) ended: SIGKILL" in log and "Traceback" not in log, log


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        ("--prefill-tp-size", "2", "--decode-tp-size", "2", "--dp-size", "2"),
        ("--prefill-tp-size", "4", "--decode-tp-size", "2", "--dp-size", "2"),
        ("--prefill-tp-size", "2", "--prefill-dp-size", "2"),
        ("--decode-tp-size", "4", "--decode-dp-size", "2"),
    ],
)
async def test_prefill_and_decode_workers_may_have_it_or_not(
    sizes: tuple[str, ...], qwen3: str, tmp_path: Path
) -> None:
    """KV goes between all schedulers and their ranks."""
    given = ("--model-path", qwen3, "--enable-dp-attention", *sizes, "--disaggregation-kv-checksum", *FLAGS)
    with cluster(tmp_path, *given, "--transfer-backend", "nixl") as up:
        expected = references(qwen3)
        for _ in range(2):
            answers = await generate_all(up.router, mixed_bodies(seed=1, count=16))
            assert [answer["output_ids"] for answer in answers] == expected
        await assert_all_back(up)
        (decode,) = up.of("decode")
        assert (await state_of(decode.url))["counters"]["kv_checksum_verified"] >= 16


@pytest.mark.slow
async def test_a_rank_that_stands_still_is_named(qwen3: str, tmp_path: Path) -> None:
    """The other scheduler waits for its row, and says so."""
    flags = ("--model-path", qwen3, "--tp-size", "2", "--watchdog-timeout", "1", "--port", "0", *DP, *FLAGS)
    with tandem(tmp_path, "serve", *flags) as worker:
        pids: list[int] = json.loads(await text_of(f"{worker.url}/server_info"))["rank_pids"]
        stopped = psutil.Process(pids[1])
        async with session() as http:
            stopped.send_signal(signal.SIGSTOP)
            body: dict[str, Any] = {"input_ids": [20, 21], "sampling_params": LONG, "routed_dp_rank": 0}
            running = asyncio.create_task(generate(http, worker.url, body))
            await asyncio.to_thread(
                wait_until,
                lambda: worker.process.poll() is not None,
                within_s=3 * WITHIN_S,
                what="the end of the worker",
            )
            await asyncio.gather(running, return_exceptions=True)
        assert "waits for rank 1 of 2" in worker.log.read_text()
