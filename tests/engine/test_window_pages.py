"""Layers with a window give pages back while a request runs, and nothing but the window is ever read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.core.mem_cache.window_pages import WindowPages
from engine.device.step_memory import EngineUse
from engine.executor.decode_tapes import DecodeTapes
from engine.kernels.linear import linear_kernel
from engine.kv.kv_pool import DTYPES, KVPool
from engine.messages import LogprobOptions
from tests.cells import in_turn
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import ranks
from tests.models.tiny_checkpoints import make_tiny_checkpoint

WINDOW, NEW = 20, 120
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "some layers": ("qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
    "all layers": ("mistral", {"sliding_window": WINDOW}),
}
PROMPTS = [prompt_of(90, 1), prompt_of(9, 2), prompt_of(41, 3)]
FLAGS: dict[str, Any] = {
    "page_size": 4,
    "max_total_tokens": 2048,
    "chunked_prefill_size": 32,
    "max_running_requests": 4,
}


class WithWindows(EngineInProcess):
    @property
    def windows(self) -> WindowPages:
        windows = self.parts.scheduler.memory.part(WindowPages)
        assert windows is not None, "the engine keeps no pool of windows"
        return windows

    @property
    def pool(self) -> KVPool:
        pool = self.parts.device.windows
        assert isinstance(pool, KVPool) and all(spec.window == self.windows.window for spec in pool.specs)
        return pool

    def poison(self) -> None:
        """Nothing may read a page that is free, nor page 0, which stands for pages that are gone."""
        pool, allocator = self.pool, self.windows.allocator
        free = [0, *(p for p in range(1, pool.num_pages + 1) if allocator.state_of(p) == "free")]
        pool.buffer.view(DTYPES[pool.specs[0].dtype]).view(1 + pool.num_pages, -1)[torch.tensor(free)] = torch.nan


@contextmanager
def engine_of(family: str, folder: Any, dtype: str = "float32", **flags: Any) -> Iterator[WithWindows]:
    name, overrides = FAMILIES[family]
    path = make_tiny_checkpoint(folder / f"{name}-{dtype}", name, dtype=dtype, **overrides)
    with WithWindows(path, **{**FLAGS, "dtype": dtype, **flags}) as engine:
        yield engine


def answers(engine: EngineInProcess) -> dict[str, list[int]]:
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, max_new_tokens=NEW)
    engine.run()
    return engine.tokens


def all_kept(family: str, folder: Any, dtype: str) -> dict[str, list[int]]:
    """The tokens of an engine that keeps all KV: windows mask only."""
    name, overrides = FAMILIES[family]
    path = make_tiny_checkpoint(folder / f"kept-{dtype}", name, dtype=dtype, **overrides)
    with EngineInProcess(
        path, **{**FLAGS, "dtype": dtype, "enable_hierarchical_cache": True, "hicache_ratio": 1.0}
    ) as engine:
        assert engine.parts.scheduler.memory.part(WindowPages) is None
        return answers(engine)


@pytest.mark.parametrize(("family", "dtype", "overlap"), in_turn([*FAMILIES], ["float32", "bfloat16"], [True, False]))
def test_freed_pages_are_not_read(family: str, dtype: str, overlap: bool, tmp_path: Any) -> None:
    if dtype == "bfloat16" and linear_kernel() is None:
        pytest.skip("bits of bf16 need the C kernel")
    stream = {"stream": "threaded", "stream_delay_s": 0.001} if overlap else {}
    with engine_of(family, tmp_path, dtype, **stream) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add(str(i), prompt, max_new_tokens=NEW)
        assert (engine.recorded(DecodeTapes) is not None) == (dtype == "bfloat16"), "decode steps are played as ever"
        most = 0
        while engine.turn():
            engine.parts.device.executor.call(engine.poison)
            running = engine.parts.scheduler.stages.running
            most = max(
                [most, *(sum(page > 0 for page in r.windows.pages) for r in running if len(r.output_ids) > WINDOW)]
            )
        whole = -(-(len(PROMPTS[0]) + NEW) // 4)
        assert 0 < most <= -(-(WINDOW + 1) // 4) + 1 < whole / 5, "pages behind the window go while the answer grows"
        assert engine.tokens == all_kept(family, tmp_path, dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_are_found_while_their_window_is_there(family: str, tmp_path: Any) -> None:
    with engine_of(family, tmp_path) as engine:
        first = answers(engine)
        before = dict(first)
        engine.answer("again", PROMPTS[0], max_new_tokens=NEW)
        assert engine.tokens["again"] == before["0"] and engine.cached["again"] == 88
        longer = PROMPTS[0] + before["0"][:60]
        assert engine.answer("longer", longer, max_new_tokens=4) == before["0"][60:64]
        windows = engine.windows
        while windows._idle:
            windows._evict(next(iter(windows._idle)))
        engine.answer("forgotten", PROMPTS[0], max_new_tokens=NEW)
        assert engine.tokens["forgotten"] == before["0"] and engine.cached["forgotten"] == 0


def test_a_small_pool_serves_more_requests_than_it_holds(tmp_path: Any) -> None:
    """Few pages of the window's pool: requests wait for their bound, none fails, and the answers stay."""
    flags = {"max_running_requests": 2, "chunked_prefill_size": 16, "max_total_tokens": 4096}
    with engine_of("some layers", tmp_path, **flags) as engine:
        assert engine.windows.allocator.num_pages < 60
        assert answers(engine) == all_kept("some layers", tmp_path, "float32")


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_window_copied_to_the_host_comes_back_in_every_bit(tp_size: int, tmp_path: Any) -> None:
    if linear_kernel() is None:
        pytest.skip("bits of bf16 need the C kernel")
    name, overrides = FAMILIES["some layers"]
    path = make_tiny_checkpoint(tmp_path / name, name, dtype="bfloat16", **overrides)
    flags = {**FLAGS, "dtype": "bfloat16", "tp_size": tp_size}
    with ranks(path, **{**flags, "disable_hybrid_swa_memory": True}) as kept:
        right = logprobs_of(kept.engine)
        assert kept.engine.parts.scheduler.memory.part(WindowPages) is None
    with ranks(path, use=EngineUse(retracted_kv="host"), **{**flags, "test_retract": 5}) as group:
        assert logprobs_of(group.engine) == right
        scheduler = group.engine.parts.scheduler
        assert scheduler.memory.part(WindowPages) is not None and scheduler.counters.resumed_restored > 5
        assert scheduler.counters.resumed_computed == 0


def logprobs_of(engine: EngineInProcess) -> dict[str, list[tuple[int, float]]]:
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, max_new_tokens=NEW, logprobs=LogprobOptions())
    engine.run()
    return {rid: [(entry.token_id, entry.logprob) for entry in found] for rid, found in engine.logprobs.items()}


@pytest.mark.parametrize(
    ("family", "flags", "told"),
    [
        ("some layers", {}, "freed"),
        ("some layers", {"disable_hybrid_swa_memory": True}, "kept: --disable-hybrid-swa-memory"),
        ("some layers", {"enable_hierarchical_cache": True, "hicache_ratio": 1.0}, "kept: --enable-hierarchical-cache"),
        ("none", {}, None),
    ],
)
def test_the_start_tells_whether_kv_behind_windows_is_freed(
    family: str, flags: dict[str, Any], told: str | None, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="engine.device.pools")
    name, fields = FAMILIES.get(family, ("qwen2", {}))
    with EngineInProcess(make_tiny_checkpoint(tmp_path, name, **fields), **{**FLAGS, **flags}) as engine:
        assert engine.parts.behind_windows == told
        assert (engine.parts.scheduler.memory.part(WindowPages) is not None) == (told == "freed")
    assert caplog.text.count("KV behind the windows") == (told is not None) and (told or "") in caplog.text
