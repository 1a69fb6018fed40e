"""How a CPU's memory is shared out between KV pages and recurrent states, and what the log says of it."""

import ctypes
import logging
import mmap
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core.mem_cache.state_slots import StateSlots
from engine.device.measure import measure_on_cpu
from engine.device.memory_plan import (
    MeasuredMemory,
    kv_pages,
    static_left,
    with_fitting_prompts,
    with_running_requests,
    with_state_slots,
)
from engine.device.step_memory import LocalMachine
from engine.flags.resolve import resolve, state_slots
from engine.kv.host_memory import HostMemory
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from service.flags import ConfigError
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.ranks.ranks_in_process import ranks
from tests.models.tiny_checkpoints import make_tiny_checkpoint

MIB = 1 << 20


def with_free(root: Path, size_bytes: int) -> HostMemory:
    """A machine that has so much free memory."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemAvailable: {size_bytes // 1024} kB\n")
    return HostMemory(root)


def configs(**flags: Any) -> tuple[EngineConfig, EngineConfig]:
    """As given, and resolved."""
    given = EngineConfig(model_path=DEFAULT_MODEL_PATH, device="cpu", **flags)
    return given, resolve(given, load_model_config(DEFAULT_MODEL_PATH), cuda=False)


def measured(
    free: int, *, weights: int = 0, steps: int = 0, tokens: int = 1, samples: int = 0, graphs: int = 0
) -> MeasuredMemory:
    """`steps`: of a prompt of so many `tokens`."""
    return MeasuredMemory(
        memory=free,
        free=free,
        weights=weights,
        prompts=steps,
        token_bytes=steps / tokens,
        samples=samples,
        graphs=graphs,
        on_gpu=False,
    )


def slots_of(slot_bytes: int, *, free: int = 10_000 * MIB, sharers: int = 1, **flags: Any) -> int:
    return room_of(slot_bytes, free=free, sharers=sharers, **flags)[0]


def room_of(
    slot_bytes: int, *, free: int = 10_000 * MIB, sharers: int = 1, drafted: int = 0, **flags: Any
) -> tuple[int, int]:
    """Slots, and shadows of those that pass drafts."""
    given, config = configs(mem_fraction_static=0.2, **flags)
    found = measured(free // sharers)
    config, shadows = with_state_slots(given, config, found, slot_bytes=slot_bytes, drafted=drafted)
    return state_slots(config), shadows


def test_states_take_no_more_than_their_share() -> None:
    assert slots_of(MIB) == 128, "two for each of 64 requests fit"
    assert slots_of(74 * MIB) == 12, "2,000 MiB, of which 0.9 / 1.9 are for states of Qwen3-Next"
    assert slots_of(74 * MIB, sharers=2) == 6
    assert slots_of(74 * MIB, max_mamba_cache_size=40) == 40
    assert slots_of(MIB, max_running_requests=3) == 6


def test_drafts_take_a_state_more_of_each_request_that_runs() -> None:
    """Of 24 slots a third; where few requests are to be drafted, no more than these."""
    big = 10 * MIB, 24 * 10 * 1.9 / 0.9 * 5 * MIB  # so that 24 fit
    assert room_of(big[0], free=int(big[1]) + MIB, drafted=64) == (16, 8)
    assert room_of(big[0], free=int(big[1]) + MIB, drafted=3) == (21, 3)
    assert room_of(big[0], free=int(big[1]) + MIB) == (24, 0)
    assert room_of(MIB, drafted=64) == (128, 64) and room_of(MIB, drafted=8, max_running_requests=3) == (6, 3)
    assert room_of(74 * MIB, max_mamba_cache_size=40, drafted=64) == (40, 20)
    two = 2 * 74 * 1.9 / 0.9 * 5 * MIB + MIB
    assert room_of(74 * MIB, free=int(two), drafted=8) == (2, 0), "what a grammar forces does without"
    with pytest.raises(ConfigError, match=r"one request needs three with --speculative-algorithm NGRAM; raise"):
        room_of(74 * MIB, free=int(two), drafted=8, speculative_algorithm="NGRAM")


def test_copies_for_drafts_are_in_the_log_and_the_account(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3_next")
    caplog.set_level(logging.INFO)
    sizes = {}
    for algorithm in (None, "NGRAM"):
        flags: dict[str, Any] = {
            "max_running_requests": 12,
            "max_mamba_cache_size": 24,
            "speculative_algorithm": algorithm,
        }
        with EngineInProcess(path, num_threads=1, max_total_tokens=1024, **flags) as engine:
            pool = engine.parts.device.states
            assert pool is not None and engine.parts.memory["states"] == pool.buffer.nbytes
            sizes[algorithm] = pool.num_shadows
    assert sizes == {None: 8, "NGRAM": 12}, "of what a grammar forces 8 at most"
    assert "24 recurrent states and 8 copies for drafts" in caplog.text and "and 12 copies for drafts" in caplog.text


def test_a_state_that_does_not_fit_is_refused_with_its_size() -> None:
    with pytest.raises(
        ConfigError, match=r"--mem-fraction-static 0.2: 100 MiB, .* states of 74.0 MiB, .* --max-mamba-"
    ):
        slots_of(74 * MIB, free=500 * MIB)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_engine_runs_with_the_states_that_fit(
    tp_size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fewer than two for each request: what waits for a slot runs later."""
    path = make_tiny_checkpoint(tmp_path, "qwen3_next")
    host = with_free(tmp_path, MIB)
    caplog.set_level(logging.INFO)
    flags: dict[str, Any] = {"max_running_requests": 32, "num_threads": 1, "max_total_tokens": 1024}
    if tp_size == 1:
        engine = EngineInProcess(path, machine=LocalMachine(host=host), **flags)
        run(engine)
        engine.close()
    else:
        with ranks(path, tp_size=tp_size, host=host, **flags) as group:
            run(group.engine)
    assert "a KV cache of 1024 tokens in " in caplog.text and ", states 0." in caplog.text


def run(engine: EngineInProcess) -> None:
    states = engine.parts.scheduler.memory.part(StateSlots)
    assert states is not None and 2 <= states.allocator.num_pages < 32
    for i in range(32):
        engine.add(str(i), list(range(16, 100 + i)), max_new_tokens=3)
    engine.run()
    assert all(len(tokens) == 3 for tokens in engine.tokens.values()) and len(engine.tokens) == 32


def test_the_share_is_of_weights_and_pages_together() -> None:
    found = measured(1000 * MIB, weights=300 * MIB, steps=50 * MIB)
    given, _ = configs(mem_fraction_static=0.5)
    assert static_left(given, found) == 200 * MIB
    assert static_left(configs()[0], found) == int(0.2 * 650 * MIB), "unset: a part of what weights and steps leave"
    with pytest.raises(
        ConfigError, match=r"^--mem-fraction-static 0.97: .* 0.9 GiB, .* 50.0 MiB beside .* at most 0.95,"
    ):
        static_left(configs(mem_fraction_static=0.97)[0], found)


def test_little_memory_lets_fewer_requests_run() -> None:
    def running(free: int, *, slots: int = 0, windows: int = 0, **flags: Any) -> int:
        given, config = configs(context_length=1024, **flags)
        pages = kv_pages(given, config, measured(free), page_bytes=MIB, states=0)
        config = with_running_requests(given, config, pages=pages, slots=slots, windows=windows)
        assert config.max_running_requests is not None
        return config.max_running_requests

    assert running(4000 * MIB) == 64
    assert running(200 * MIB) == 20, "40 pages, and a request takes two"
    assert running(5 * MIB) == 1
    assert running(4000 * MIB, slots=24) == 12
    assert running(4000 * MIB, windows=7) == 7
    assert running(200 * MIB, max_running_requests=30) == 30, "a flag wins where it can"
    with pytest.raises(
        ConfigError, match=r"^--max-running-requests 64: .* 40 KV pages; give at most 20, or raise --mem-f"
    ):
        running(200 * MIB, max_running_requests=64)
    with pytest.raises(ConfigError, match=r"64: .* 800 KV pages and 24 recurrent states; give at most 12"):
        running(4000 * MIB, slots=24, max_running_requests=64)
    with pytest.raises(ConfigError, match=r"^--mem-fraction-static 0.2: .* 0 tokens, fewer than a page's 16"):
        running(4 * MIB)
    with pytest.raises(
        ConfigError, match=r"^--max-total-tokens 6400: a KV cache of 0.4 GiB, .* 200.0 MiB .* at most 3200"
    ):
        running(200 * MIB, max_total_tokens=6400)


def test_chunks_that_take_too_much_are_shorter_unless_a_flag_says_their_length() -> None:
    def chunk(steps: int, *, recurrent: bool = False, **flags: Any) -> tuple[int | None, int]:
        given, config = configs(**flags)
        found = measured(1000 * MIB, weights=200 * MIB, steps=steps, tokens=1088, samples=90 * MIB)
        config, found = with_fitting_prompts(given, config, found, recurrent=recurrent)
        return config.chunked_prefill_size, found.steps // MIB

    assert chunk(400 * MIB) == (1024, 400)
    assert chunk(800 * MIB) == (512, 400), "a chunk and a 16th"
    assert chunk(801 * MIB, recurrent=True) == (448, 350)
    assert chunk(400_000 * MIB) == (16, 6250)
    assert chunk(1600 * MIB, max_running_requests=7) == (256, 400)
    assert chunk(800 * MIB, chunked_prefill_size=768) == (768, 800)


def test_steps_of_whole_prompts_follow_from_memory() -> None:
    """A step of the longest prompt has to fit; the rest is for further prompts in it."""

    def batch(free: int, *, context: int = 1000, **flags: Any) -> tuple[int | None, int]:
        given, config = configs(chunked_prefill_size=-1, context_length=context, max_running_requests=10, **flags)
        tokens = max(config.max_prefill_tokens or 0, context)
        found = measured(free + 50 * MIB, weights=50 * MIB, steps=tokens * MIB, tokens=tokens)
        config, found = with_fitting_prompts(given, config, found, recurrent=False)
        return config.max_prefill_tokens, found.steps // MIB

    assert batch(40_000 * MIB) == (16384, 16384), "the default"
    assert batch(20_000 * MIB) == (10_000, 10_000), "half of what weights leave"
    assert batch(1600 * MIB) == (1010, 1010), "a prompt, and decodes that ride along"
    assert batch(40_000 * MIB, context=20_000) == (16384, 20_000)
    assert batch(3000 * MIB, max_prefill_tokens=2800) == (2800, 2800), "a flag wins where it can"
    with pytest.raises(
        ConfigError,
        match=r"^--max-prefill-tokens 3001: memory holds a step of 3000 .* at most 3000, or leave --chunked-pr",
    ):
        batch(3000 * MIB, max_prefill_tokens=3001)
    with pytest.raises(
        ConfigError,
        match=r"^--chunked-prefill-size -1: .* 1000 tokens, .* holds a step of 999 .* --context-length 999 at",
    ):
        batch(999 * MIB)
    assert batch(999 * MIB, max_total_tokens=512)[0] == 522, "no prompt is longer than the KV cache"


def test_a_small_machine_serves_with_fewer_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has 1 MiB for weights, steps and KV; what a step takes is read from the process."""
    path = make_tiny_checkpoint(tmp_path, "llama")
    host = with_free(tmp_path, MIB)
    caplog.set_level(logging.INFO)
    with EngineInProcess(
        path, machine=LocalMachine(host=host), max_total_tokens=None, context_length=512, num_threads=1
    ) as engine:
        most = engine.parts.config.max_running_requests
        assert most is not None and 1 <= most < 64 and engine.parts.scheduler.limits.max_running_requests == most
        for i in range(32):
            engine.add(str(i), list(range(16, 60 + i)), max_new_tokens=3)
        engine.run()
        assert all(len(tokens) == 3 for tokens in engine.tokens.values()) and len(engine.tokens) == 32
        assert engine.parts.memory["kv_pages"] < 0.3 * MIB
    assert f"at most {most} running requests" in caplog.text


def test_the_largest_steps_are_measured(tmp_path: Path) -> None:
    """A longer chunk takes more."""
    path = make_tiny_checkpoint(tmp_path, "llama")

    def steps(chunk: int) -> int:
        flags: dict[str, Any] = {"chunked_prefill_size": chunk, "context_length": 512, "num_threads": 1}
        with EngineInProcess(path, max_total_tokens=None, **flags) as engine:
            return engine.parts.memory["steps"]

    assert steps(8192) > steps(16) + MIB


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}], ids=["TP 2", "PP 2"])
def test_ranks_measure_their_steps_and_have_what_each_holds(
    sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of a follower take more than its leader's: all have the chunks that it holds, and answer as one rank does."""
    path = make_tiny_checkpoint(tmp_path, "gemma3_text")
    caplog.set_level(logging.INFO)
    flags: dict[str, Any] = {"context_length": 512, "num_threads": 1, "dtype": "float32", "max_running_requests": 4}
    with EngineInProcess(path, max_total_tokens=4096, **flags) as engine:
        alone = answers(engine)
    found: dict[bool, MeasuredMemory] = {}

    def large(*args: Any, **kwargs: Any) -> MeasuredMemory:
        """Run the steps, and give figures of a larger model on a small machine."""
        leads = threading.current_thread() is threading.main_thread()
        token = MIB // (16 if leads else 4)
        one = replace(measure_on_cpu(*args, **kwargs), memory=100 * MIB, free=100 * MIB, weights=0)
        found[leads] = replace(one, prompts=1088 * token, token_bytes=token)
        return found[leads]

    monkeypatch.setattr("engine.device.measure.measure_on_cpu", large)
    with ranks(path, **sizes, **{**flags, "max_total_tokens": None}) as group:
        parts = group.engine.parts
        assert len(found) == 2, "both measured, at the same time: steps need both"
        assert parts.config.chunked_prefill_size == 176, "half of a follower's 100 MiB"
        assert [pool.num_pages for pool in group.pools.values()] == [parts.pool.num_pages]
        assert answers(group.engine) == alone
    assert "chunks of 176 tokens" in caplog.text


def answers(engine: EngineInProcess) -> dict[str, list[int]]:
    for i in range(6):
        engine.add(str(i), list(range(16, 60 + 90 * (i % 3))), max_new_tokens=5)
    engine.run()
    return dict(engine.tokens)


def test_two_lanes_have_room_for_a_prompt_step_beside_a_decode_step() -> None:
    one = measured(free=100 * MIB, steps=30 * MIB, samples=20 * MIB)
    both = one.at_once(1)
    assert (one.steps, both.steps, both.most) == (30 * MIB, 50 * MIB, 50 * MIB)


# ---- A real map: which of its memory the system has found, by mincore.

HUGE_PAGE = 2 << 20


def resident(memory: torch.Tensor) -> set[bool]:
    """Whether the memory pages behind the first huge page are there: {True}, {False}, or both."""
    size = memory.numel() - HUGE_PAGE
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(memory.data_ptr() + HUGE_PAGE, size, found) == 0, ctypes.get_errno()
    return {bool(page & 1) for page in found}


def test_an_engine_touches_no_kv_memory_at_start(tmp_path: Path) -> None:
    with EngineInProcess(make_tiny_checkpoint(tmp_path, "llama")) as engine:
        assert resident(engine.parts.pool.buffer) == {False}
        engine.parts.pool.buffer.zero_()
        assert resident(engine.parts.pool.buffer) == {True}
