"""DP attention of real processes: answers, what a worker says of itself, and the end of any rank; the same between two workers."""

import asyncio
import json
import signal
from pathlib import Path

import psutil

from tests.e2e.client import generate, generate_all, session, state_of, text_of, wait_for_state
from tests.e2e.cluster import cluster, tandem, wait_until
from tests.e2e.test_ranks import FLAGS, processes, prompt_of
from tools.recall.oracle import continuation

WITHIN_S = 10.0
PROMPTS = [prompt_of(size, seed) for seed, size in enumerate((3, 90, 40, 12, 60, 7))]
FOUR = ("--tp-size", "4", "--dp-size", "2", "--enable-dp-attention", "--enable-prefill-delayer")


def bodies(new: int) -> list[dict[str, object]]:
    return [{"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": new}} for ids in PROMPTS]


async def test_it_answers_rests_and_ends_with_any_of_its_ranks(tmp_path: Path) -> None:
    with tandem(tmp_path, "serve", *FOUR, *FLAGS) as worker:
        answers = await generate_all(worker.url, bodies(16))
        assert [answer["output_ids"] for answer in answers] == [continuation(ids, 16) for ids in PROMPTS]

        info = json.loads(await text_of(f"{worker.url}/server_info"))
        pids, family = info["rank_pids"], processes(worker)
        assert (info["tp_size"], info["dp_size"], len(pids)) == (4, 2, 4)
        assert set(pids) <= {process.pid for process in family}

        state = await state_of(worker.url)
        assert all(rank["counters"]["prompt_tokens"] > 0 for rank in state["ranks"])

        async with session() as http:  # a rank without requests dies while another's request is computed
            body = {
                "input_ids": PROMPTS[0],
                "sampling_params": {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True},
            }
            running = asyncio.create_task(generate(http, worker.url, {**body, "routed_dp_rank": 0}))
            await wait_for_state(worker.url, lambda state: state["ranks"][0]["running"] == 1)
            psutil.Process(pids[3]).send_signal(signal.SIGKILL)
            wait_until(lambda: worker.process.poll() is not None, within_s=WITHIN_S, what="the end of the worker")
            await asyncio.gather(running, return_exceptions=True)
        _, left = psutil.wait_procs(family, timeout=WITHIN_S)
        assert not left, left
        log = worker.log.read_text()
        assert f"rank 3 of 4 (pid {pids[3]}) ended: SIGKILL" in log and "Traceback" not in log, log


async def test_prefill_and_decode_workers_may_have_it_or_not(tmp_path: Path) -> None:
    """Prefill by two DP ranks of two ranks each, decode by two of one: KV goes between all of them."""
    sizes = ("--enable-dp-attention", "--prefill-tp-size", "4", "--decode-tp-size", "2", "--dp-size", "2")
    with cluster(tmp_path, *sizes, "--disaggregation-kv-checksum", *FLAGS[: FLAGS.index("--port")]) as up:
        for _ in range(2):
            answers = await generate_all(up.router, bodies(16))
            assert [answer["output_ids"] for answer in answers] == [continuation(ids, 16) for ids in PROMPTS]
        (prefill,), (decode,) = up.of("prefill"), up.of("decode")
        here, there = [json.loads(await text_of(f"{worker.url}/server_info")) for worker in (prefill, decode)]
        assert (here["tp_size"], there["tp_size"], here["kv_units"]) == (4, 2, 2)
        assert (await state_of(decode.url))["counters"]["kv_checksum_verified"] >= len(PROMPTS)
