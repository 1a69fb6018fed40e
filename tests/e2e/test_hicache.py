"""The hierarchical cache through real processes: a prefill worker on the files of an earlier process."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import assert_all_back, generate_all, session, state_of, text_of
from tests.e2e.cluster import SETTLE_S, Cluster, Worker, cluster, wait_until
from tests.e2e.settings import settings
from tests.engine.engine_in_process import EngineInProcess, tokens_of
from tests.engine.test_host_tier import files, settle

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
        assert not any(name.startswith("hicache") for name in state(c.of("decode")[0])["counters"])
        asyncio.run(flush(c.router))
        wait_until(lambda: not files(tmp_path / "disk"), within_s=SETTLE_S, what="a flush deletes the files")
        assert state(worker)["ok"]


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
