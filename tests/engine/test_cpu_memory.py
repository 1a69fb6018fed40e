"""How a CPU's memory is shared out between KV pages and recurrent states, and what the log says of it."""

import logging
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.kv.host_memory import HostMemory
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from engine.resolve import resolve, state_slots, with_state_slots
from service.flags import ConfigError
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.ranks_in_process import ranks
from tests.models.tiny_checkpoints import make_tiny_checkpoint

MIB = 1 << 20


def with_free(root: Path, size_bytes: int) -> HostMemory:
    """A machine that has so much free memory."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemAvailable: {size_bytes // 1024} kB\n")
    return HostMemory(root)


def slots_of(slot_bytes: int, *, free: int = 10_000 * MIB, sharers: int = 1, **flags: Any) -> int:
    config = EngineConfig(model_path=DEFAULT_MODEL_PATH, mem_fraction_static=0.2, device="cpu", **flags)
    config = resolve(config, load_model_config(DEFAULT_MODEL_PATH), cuda=False)
    return state_slots(with_state_slots(config, slot_bytes=slot_bytes, free_bytes=free, sharers=sharers))


def test_states_take_no_more_than_their_share() -> None:
    assert slots_of(MIB) == 128, "two for each of 64 requests fit"
    assert slots_of(74 * MIB) == 12, "2,000 MiB, of which 0.9 / 1.9 are for states of Qwen3-Next"
    assert slots_of(74 * MIB, sharers=2) == 6
    assert slots_of(74 * MIB, mamba_full_memory_ratio=3.0) == 20
    assert slots_of(74 * MIB, max_mamba_cache_size=40) == 40
    assert slots_of(MIB, max_running_requests=3) == 6


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
    flags: dict[str, Any] = {"max_running_requests": 32, "num_threads": 1, "max_total_tokens": 4096}
    if tp_size == 1:
        engine = EngineInProcess(path, host=host, **flags)
        run(engine)
        engine.close()
    else:
        with ranks(path, tp_size=tp_size, host=host, **flags) as group:
            run(group.engine)
    assert "recurrent states 0.0" in caplog.text and "KV of 4096 tokens" in caplog.text


def run(engine: EngineInProcess) -> None:
    states = engine.parts.scheduler.memory.states
    assert states is not None and 2 <= states.allocator.num_pages < 32
    for i in range(32):
        engine.add(str(i), list(range(16, 100 + i)), max_new_tokens=3)
    engine.run()
    assert all(len(tokens) == 3 for tokens in engine.tokens.values()) and len(engine.tokens) == 32
