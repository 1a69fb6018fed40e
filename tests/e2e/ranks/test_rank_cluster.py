"""A running cluster whose prefill workers have two ranks: sizes that differ, and what reaches all ranks of a worker from outside."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.model_files.model_config import WIDE_MODEL_PATH, load_model_config
from planner.step_time import shape_of
from tests.e2e.client import assert_all_back, generate_all, post, session, state_of
from tests.e2e.cluster import cluster, wait_until
from tests.e2e.roles import move, server_info
from tests.e2e.shared.test_kv_events import wait_until_they_agree
from tests.e2e.workload import recall_prompt
from tools.recall.oracle import continuation

NEW_TOKENS = 12
EVENTS = '{"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}'
FLAGS = (
    *("--model-path", "recall-wide", "--prefill", "2", "--prefill-tp-size", "2", "--decode-tp-size", "1"),
    *("--max-total-tokens", "8192", "--chunked-prefill-size", "64", "--page-size", "4", "--num-threads", "1"),
    *("--disaggregation-kv-checksum", "--prefill-policy", "cache_aware", "--kv-events-config", EVENTS),
    *("--log-level", "warning"),
)
GONE_S = 20.0


async def answered(url: str, seed: int, count: int = 6) -> list[list[int]]:
    """Prompts whose answers are right."""
    rng = random.Random(seed)
    prompts = [recall_prompt(rng, 60) for _ in range(count)]
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    answers = await generate_all(url, [{"input_ids": ids, "sampling_params": sampling} for ids in prompts])
    assert [answer["output_ids"] for answer in answers] == [
        continuation(ids, NEW_TOKENS, ignore_eos=True) for ids in prompts
    ]
    return prompts


def events_of(trace: Path) -> list[dict[str, Any]]:
    text = trace.read_bytes()
    return json.loads(gzip.decompress(text) if trace.suffix == ".gz" else text)["traceEvents"]  # type: ignore[no-any-return]


@pytest.mark.slow
async def test_sizes_differ_and_profiles_events_and_role_switches_work(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    with cluster(tmp_path, *FLAGS) as up:
        prefills, (decode,) = up.of("prefill"), up.of("decode")
        async with session() as http:
            assert (await post(http, f"{up.router}/start_profile", {"output_dir": str(traces)}))[0] == 200
            prompts = await answered(up.router, seed=1)
            assert (await post(http, f"{up.router}/stop_profile", {}))[0] == 200
            written = sorted(file.name for file in traces.iterdir())
            named = [name.split(".")[0].rsplit("-", 2)[0] for name in written]  # without the time
            assert named == ["decode", *["prefill-rank0"] * 2, *["prefill-rank1"] * 2], written
            assert all(any("aten::" in event["name"] for event in events_of(file)) for file in traces.iterdir())

            here, there = server_info(prefills[0]), server_info(decode)
            assert (here["tp_size"], there["tp_size"], here["kv_units"], there["kv_units"]) == (2, 1, 2, 2)
            model = load_model_config(WIDE_MODEL_PATH)
            for info, tp in ((here, 2), (there, 1)):  # as planned: the leader of two has a half of a page
                assert info["page_bytes"] == info["page_size"] * shape_of(model, tp).kv_bytes
            sent = [(await state_of(worker.url))["counters"] for worker in prefills]
            pages = sum(-(-len(ids) // here["page_size"]) for ids in prompts)
            assert sum(of_one.get("bytes", 0) for of_one in sent) >= pages * there["page_bytes"]
            assert (await state_of(decode.url))["counters"]["kv_checksum_verified"] == len(prompts)

            assert any((await wait_until_they_agree(up)).values())  # each page once, not once for each rank

            moved = prefills[1]
            before = server_info(moved)["rank_pids"]
            await move(http, up, moved, "decode")
            info = server_info(moved)
            assert info["disaggregation_mode"] == "decode" and not set(info["rank_pids"]) & set(before)
            assert len(info["rank_pids"]) == 2 and all(map(psutil.pid_exists, info["rank_pids"]))
            wait_until(lambda: not any(map(psutil.pid_exists, before)), within_s=GONE_S, what="the ranks end")
            await answered(up.router, seed=2)
            await assert_all_back(up)
            counters = (await state_of(moved.url))["counters"]
            assert counters["kv_checksum_verified"] > 0 == counters["kv_checksum_failed"], counters
