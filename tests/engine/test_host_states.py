"""Recurrent states in the host tier and in files, with real KV: tokens are those of an engine without any cache."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.mem_cache.page_allocator import is_state
from router.pool.reports import parse_store
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.test_host_tier import DEADLINE_S, counters, settle
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tools.faults.stores.processes import processes

SYSTEM = prompt_of(140, 9)
PROMPTS = [
    *(SYSTEM + prompt_of(30, i) for i in range(3)),
    *(prompt_of(100 + i, 20 + i) for i in range(4)),
    SYSTEM[:70] + prompt_of(40, 30),
]
FLAGS: dict[str, Any] = {"page_size": 16, "chunked_prefill_size": 128, "num_threads": 1}
TIGHT: dict[str, Any] = {"max_total_tokens": 400, "max_running_requests": 2, "max_mamba_cache_size": 3}
TIERED: dict[str, Any] = {
    **FLAGS,
    **TIGHT,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 8.0,
    "hicache_storage_prefetch_policy": "wait_complete",
}


@pytest.fixture(scope="module", params=["qwen3_next", "falcon_h1"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> Iterator[list[list[int]]]:
    with EngineInProcess(checkpoint, **FLAGS, max_total_tokens=2048, disable_radix_cache=True) as engine:
        yield answers(engine)


def answers(engine: EngineInProcess) -> list[list[int]]:
    """One request after the other, two at a time."""
    before = len(engine.tokens)
    for at in range(0, len(PROMPTS), 2):
        for i, prompt in enumerate(PROMPTS[at : at + 2], at):
            engine.add(f"{before}-{i}", prompt, max_new_tokens=6)
        deadline_s = time.monotonic() + DEADLINE_S
        while engine.turn() or len(engine.finish) < before + len(PROMPTS[: at + 2]):
            assert time.monotonic() < deadline_s, "they do not end"
            os.sched_yield()
    return [engine.tokens[f"{before}-{i}"] for i in range(len(PROMPTS))]


def state_files(path: Path) -> list[Path]:
    return [file for file in (path / "0").glob("*.kv") if is_state(bytes.fromhex(file.stem))]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("stream", ["inline", "threaded"])
def test_tokens_are_the_same_when_states_come_back_from_the_host(
    policy: str, stream: str, checkpoint: str, expected: list[list[int]]
) -> None:
    with EngineInProcess(checkpoint, **TIERED, hicache_write_policy=policy, stream=stream) as engine:
        assert answers(engine) == answers(engine) == expected
        assert counters(engine)["hicache_host_hit_tokens"] >= 4 * 64


@pytest.mark.parametrize("damage", ["", "states", "pages"])
def test_a_second_worker_begins_from_the_files_of_the_first(
    damage: str, checkpoint: str, expected: list[list[int]], tmp_path: Path
) -> None:
    disk = {"hicache_storage_dir": str(tmp_path)}
    with EngineInProcess(checkpoint, **TIERED, **disk) as first:
        assert answers(first) == expected
        settle(first)
    states = state_files(tmp_path)
    assert len(states) >= 6
    pages = [path for path in (tmp_path / "0").glob("*.kv") if path not in states]
    for path in {"": [], "states": states, "pages": pages}[damage]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with EngineInProcess(checkpoint, **TIERED, **disk) as second:
        assert answers(second) == expected
        counted = counters(second)
        if damage:
            assert counted["hicache_bad_files"] > 0
        else:
            assert counted["hicache_disk_hit_tokens"] >= 6 * 64 and counted["hicache_bad_files"] == 0


def test_a_state_of_another_prefix_is_a_miss(checkpoint: str, expected: list[list[int]], tmp_path: Path) -> None:
    """Whole, with a right checksum, and under the wrong name."""
    disk = {"hicache_storage_dir": str(tmp_path)}
    with EngineInProcess(checkpoint, **TIERED, **disk) as first:
        answers(first)
        settle(first)
    states = state_files(tmp_path)
    found = [path.read_bytes() for path in states]
    for path, other in zip(states, [*found[1:], found[0]], strict=True):
        path.write_bytes(other)
    with EngineInProcess(checkpoint, **TIERED, **disk) as second:
        assert answers(second) == expected
        assert counters(second)["hicache_bad_files"] > 0


def test_a_worker_begins_from_the_states_in_a_shared_store(checkpoint: str, expected: list[list[int]]) -> None:
    with processes() as stores:
        master = stores.master()
        stores.store(master, segment="64mb")
        where = {"master_server_address": master.address, "global_segment_size": 0, "timeout_s": 30}
        shared = {
            "hicache_storage_backend": "mooncake",
            "hicache_storage_backend_extra_config": json.dumps(where),
        }
        own_bytes = 16 << 20
        gives = {"hicache_storage_backend_extra_config": json.dumps(where | {"global_segment_size": own_bytes})}
        with EngineInProcess(checkpoint, **TIERED, **shared) as first:
            assert answers(first) == expected
            settle(first)
        with EngineInProcess(checkpoint, **TIERED, **shared | gives) as second:
            assert answers(second) == expected
            for one, given in ((first, 0), (second, own_bytes)):
                shown = parse_store({"hicache_storage": one.storage and one.storage.place})
                assert shown is not None and shown.tokens == given // shown.token_bytes
            counted = counters(second)
            assert counted["hicache_disk_hit_tokens"] >= 6 * 64 and counted["hicache_bad_files"] == 0
