"""The hierarchical cache through real processes: a prefill worker on the files of an earlier process."""

import asyncio
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import (
    assert_all_back,
    generate,
    generate_all,
    post,
    session,
    state_of,
    text_of,
    wait_for_state,
)
from tests.e2e.cluster import SETTLE_S, Cluster, Started, Worker, cluster, several, tandem, wait_until
from tests.e2e.settings import settings
from tests.e2e.test_routes import join, kill
from tests.engine.engine_in_process import EngineInProcess, tokens_of
from tests.engine.test_host_tier import files, settle
from tools.faults.stores.processes import processes

FAMILIES, PREFIX_TOKENS, NEW_TOKENS, PAGE_SIZE = 8, 256, 6, 8
TIERED = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "4"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
    *("--max-total-tokens", "1024", "--page-size", str(PAGE_SIZE), "--chunked-prefill-size", "128"),
    *("--stream", "threaded", "--log-level", "warning"),
)


def prompts() -> list[list[int]]:
    """Three requests to each long prefix: together eight times what the device holds."""
    rng = random.Random(4)
    prefixes = [[rng.randrange(16, 272) for _ in range(PREFIX_TOKENS)] for _ in range(FAMILIES)]
    return [[*prefix, *(rng.randrange(16, 272) for _ in range(5 + i))] for i in range(3) for prefix in prefixes]


@pytest.fixture(scope="module")
def expected(qwen3: str) -> list[list[int]]:
    """Without any cache."""
    return tokens_of(qwen3, bodies(), disable_radix_cache=True)


def bodies() -> list[dict[str, Any]]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts()]


def state(worker: Worker) -> dict[str, Any]:
    return asyncio.run(state_of(worker.url))


def disk_at_rest(worker: Worker) -> bool:
    return not state(worker)["gauges"]["hicache_disk_pending"]


def serve(c: Cluster, expected: list[list[int]]) -> None:
    answers = asyncio.run(generate_all(c.router, bodies()))
    assert [answer["output_ids"] for answer in answers] == expected
    asyncio.run(assert_all_back(c))


def test_tokens_are_the_same_from_host_and_from_files_of_an_earlier_process(
    qwen3: str, expected: list[list[int]], tmp_path: Path
) -> None:
    write_files(qwen3, tmp_path / "disk")
    assert len(files(tmp_path / "disk")) >= FAMILIES * PREFIX_TOKENS // PAGE_SIZE
    for file in files(tmp_path / "disk")[::5]:
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    args = ("--model-path", qwen3, "--hicache-storage-dir", str(tmp_path / "disk"), *TIERED)
    with cluster(tmp_path / "pd", "--transfer-backend", "nixl", *args, env=settings(stream_delay_s=0.001)) as c:
        (worker,) = c.of("prefill")
        serve(c, expected)
        first = state(worker)["counters"]
        assert first["hicache_disk_hit_tokens"] > 0 and first["hicache_bad_files"] > 0
        serve(c, expected)
        again = state(worker)["counters"]
        assert again["hicache_host_hit_tokens"] - first["hicache_host_hit_tokens"] >= FAMILIES * PREFIX_TOKENS // 2
        wait_until(lambda: disk_at_rest(worker), within_s=SETTLE_S, what="the files are written")
        metrics = asyncio.run(text_of(f"{worker.url}/metrics"))
        names = ("tandem_hicache_host_hit_tokens_total", "sglang:hicache_host_used_tokens")
        for name in (*names, "tandem_hicache_disk_used_bytes"):
            assert f"{name}{{" in metrics
        assert state(c.of("decode")[0])["counters"]["hicache_saved_pages"] > 0
        asyncio.run(flush(c.router))
        wait_until(lambda: not files(tmp_path / "disk"), within_s=SETTLE_S, what="a flush deletes the files")
        assert state(worker)["ok"]


def test_workers_share_a_store_and_compute_without_it(qwen3: str, expected: list[list[int]], tmp_path: Path) -> None:
    with processes() as stores:
        master = stores.master()
        stores.store(master, segment="256mb")
        where = {"master_server_address": master.address, "global_segment_size": 0}
        shared = ("--hicache-storage-backend", "mooncake", "--hicache-storage-backend-extra-config", json.dumps(where))
        args = ("--model-path", qwen3, "--transfer-backend", "nixl", *TIERED, *shared)
        with cluster(tmp_path / "pd", *args) as c:
            (first,), (second,) = c.of("prefill"), c.of("decode")
            answer(first, expected)
            wait_until(lambda: disk_at_rest(first), within_s=SETTLE_S, what="the pages are written")
            answer(second, expected)
            read = state(second)["counters"]
            assert read["hicache_disk_hit_tokens"] >= PREFIX_TOKENS, "one reads what the other has computed"
            assert read["hicache_bad_files"] == 0
            info = json.loads(asyncio.run(text_of(f"{second.url}/get_server_info")))
            assert f"mooncake://{master.address}" in json.dumps(info)
            master.kill()
            serve(c, expected)


def test_the_router_finds_a_dead_worker_s_pages_in_the_store(qwen3: str, tmp_path: Path) -> None:
    """One worker has computed a prompt and is gone: others read its pages, and the price of their routes counts that."""
    with processes() as stores:
        master = stores.master()
        stores.store(master, segment="256mb")
        where = {"master_server_address": master.address, "global_segment_size": 0, "timeout_s": 30}
        shared = ("--hicache-storage-backend", "mooncake", "--hicache-storage-backend-extra-config", json.dumps(where))
        flags = ("serve", "--model-path", qwen3, "--port", "0", "--device", "cpu", *TIERED, *shared)
        own = ("--disaggregation-bootstrap-port", "0")
        roles = {"first": ("prefill", *own), "prefill": ("prefill", *own), "decode": ("decode",)}
        commands = {name: (*flags, "--disaggregation-mode", *role) for name, role in roles.items()}
        router = ("router", "--port", "0", "--pd-disaggregation", "--route", "auto", "--policy", "cache_aware")
        with several(tmp_path, commands) as workers, tandem(tmp_path / "router", *router) as started:
            asyncio.run(outlive(workers.pop("first"), workers, started.url))


async def outlive(first: Started, others: Mapping[str, Started], router: str) -> None:
    asked = bodies()[0]
    async with session() as http:
        await join(http, router, first, "prefill")
        right = await generate(http, router, asked)
        await wait_for_state(first.url, lambda state: not state["gauges"]["hicache_disk_pending"])
        kill(first)
        for role, worker in others.items():
            await join(http, router, worker, role)
        found = await generate(http, router, asked)
        assert found["output_ids"] == right["output_ids"]
        assert found["meta_info"]["cached_tokens"] >= PREFIX_TOKENS
        _, listed = await post(http, f"{router}/traces", {"last": 100})
    (said,) = [one["attributes"] for one in listed["records"] if "tandem.route" in one["attributes"]]
    assert said["tandem.route.fetched_from"] == "store", said
    assert said["tandem.route.fetched_tokens"] >= PREFIX_TOKENS and said["tandem.route.cached_tokens"] == 0
    read = [(await state_of(worker.url))["counters"]["hicache_disk_hit_tokens"] for worker in others.values()]
    assert sum(read) >= PREFIX_TOKENS
    loads = [json.loads(await text_of(f"{worker.url}/v1/loads"))["loads"][0] for worker in others.values()]
    assert max(load["memory"]["storage_read_gb_s"] for load in loads) > 0


def answer(worker: Worker, expected: list[list[int]]) -> None:
    """Without the other worker."""
    answers = asyncio.run(generate_all(worker.url, bodies()))
    assert [answer["output_ids"] for answer in answers] == expected


def write_files(checkpoint: str, folder: Path) -> None:
    """As a worker of its own does that serves all of it."""
    flags = {"hicache_storage_dir": str(folder), "hicache_ratio": 4.0}
    shape = {"max_total_tokens": 1024, "page_size": PAGE_SIZE, "chunked_prefill_size": 128}
    with EngineInProcess(checkpoint, enable_hierarchical_cache=True, **flags, **shape) as engine:
        for i, asked in enumerate(bodies()):
            engine.add(str(i), asked["input_ids"], **asked["sampling_params"])
            engine.run()
        settle(engine)


async def flush(url: str) -> None:
    async with session() as http, http.post(f"{url}/flush_cache") as response:
        assert response.status == 200, await response.text()
