"""The hierarchical cache through real processes: a worker on its own, killed, then a prefill worker on the same files."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import assert_all_back, generate_all, session, state_of, text_of
from tests.e2e.cluster import SETTLE_S, Cluster, Worker, cluster, wait_until
from tests.engine.engine_in_process import tokens_of

FAMILIES, PREFIX_TOKENS, NEW_TOKENS = 8, 256, 6
TIERED = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-storage-backend", "file"),
    *("--max-total-tokens", "1024", "--page-size", "8", "--chunked-prefill-size", "128"),
    *("--stream", "threaded", "--stream-delay", "0.001", "--log-level", "warning"),
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


def files(folder: Path) -> list[Path]:
    return list((folder / "0").glob("*.kv"))


def served(c: Cluster, expected: list[list[int]]) -> list[dict[str, Any]]:
    """What each request's prompt cost: `meta_info`."""
    answers = asyncio.run(generate_all(c.router, bodies()))
    assert [answer["output_ids"] for answer in answers] == expected
    asyncio.run(assert_all_back(c))
    return [answer["meta_info"] for answer in answers]


def test_tokens_are_the_same_from_host_and_from_files_of_an_earlier_process(
    qwen3: str, expected: list[list[int]], tmp_path: Path
) -> None:
    args = ("--model-path", qwen3, "--hicache-storage-dir", str(tmp_path / "disk"), *TIERED)
    with cluster(tmp_path / "unified", "--unified", *args) as c:
        (worker,) = c.workers
        served(c, expected)
        for meta in (metas := served(c, expected)):
            assert sum(meta["cached_tokens_details"].values()) == meta["cached_tokens"]
        assert sum(meta["cached_tokens_details"]["host"] for meta in metas) >= FAMILIES * PREFIX_TOKENS // 2
        wait_until(lambda: disk_at_rest(worker), within_s=SETTLE_S, what="the files are written")
        metrics = asyncio.run(text_of(f"{worker.url}/metrics"))
        names = ("tandem_hicache_host_hit_tokens_total", "sglang:hicache_host_used_tokens")
        for name in (*names, "tandem_hicache_disk_used_bytes"):
            assert f"{name}{{" in metrics
    assert len(files(tmp_path / "disk")) >= FAMILIES * PREFIX_TOKENS // 8
    damaged = sorted(files(tmp_path / "disk"))[::5]
    for file in damaged:
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    policy = ("--hicache-storage-prefetch-policy", "wait_complete")
    with cluster(tmp_path / "pd", "--transfer-backend", "nixl", *policy, *args) as c:
        (worker,) = c.of("prefill")
        served(c, expected)
        counters = state(worker)["counters"]
        assert counters["hicache_disk_hit_tokens"] > 0 and counters["hicache_bad_files"] > 0
        assert not any(name.startswith("hicache") for name in state(c.of("decode")[0])["counters"])
        asyncio.run(flush(c.router))
        wait_until(lambda: not files(tmp_path / "disk"), within_s=SETTLE_S, what="a flush deletes the files")
        assert state(worker)["ok"]


async def flush(url: str) -> None:
    async with session() as http, http.post(f"{url}/flush_cache") as response:
        assert response.status == 200, await response.text()
