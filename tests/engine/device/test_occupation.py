"""An engine gives its memory back and takes it again: the process shrinks, and tokens are those of before."""

import gc
import sys
import types
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engine.kv.kv_pool import zeroed_bytes
from engine.kv.pool_memory import MappedMemory, SavedMemory
from service.flags import ConfigError
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import ranks
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.models.tiny_drafters import make_tiny_eagle

PROMPT = prompt_of(50, 1)
SIZE = 64 << 20


def tokens(engine: EngineInProcess, rid: str) -> list[int]:
    return engine.answer(rid, PROMPT, max_new_tokens=8)


def release_and_resume(engine: EngineInProcess, path: str) -> None:
    parts = engine.parts
    assert parts.scheduler.flush_cache()
    parts.kv.release()
    model = weakref.ref(parts.device.executor.runner.running.model)
    parts.weights.release()
    gc.collect()
    assert model() is None, "something keeps the weights"
    parts.kv.resume()
    parts.weights.take(parts.weights.read(path, when_done=lambda: None).result(), model_path=path, version=None)


DRAFTER = {"speculative_algorithm": "EAGLE3", "num_threads": 1}
WITH: tuple[dict[str, Any], ...] = ({}, {"enable_lora": True, "max_lora_rank": 8}, {"dtype": "bfloat16"}, DRAFTER)


@pytest.mark.parametrize("flags", WITH, ids=str)
def test_weights_and_pages_go_and_come(flags: dict[str, Any], tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3")
    if flags is DRAFTER:
        flags = {**flags, "speculative_draft_model_path": make_tiny_eagle(tmp_path / "drafter", "EAGLE3")}
    with EngineInProcess(path, **flags) as engine:
        before = tokens(engine, "before")
        release_and_resume(engine, path)
        assert tokens(engine, "after") == before


def test_a_mixture_without_its_weights_has_no_loads(tmp_path: Path) -> None:
    """/metrics asks for them at any time."""
    path = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    with EngineInProcess(path) as engine:
        tokens(engine, "before")
        runner = engine.parts.device.executor.runner
        assert runner.expert_gauges() and runner.expert_loads()
        engine.parts.weights.release()
        assert not runner.expert_gauges() and not runner.expert_loads()


def test_all_ranks_give_theirs(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3")
    with ranks(path, tp_size=2) as group:
        before = tokens(group.engine, "before")
        assert all(pool.buffer.any() for pool in group.pools.values())
        group.engine.parts.scheduler.flush_cache()
        group.engine.parts.kv.release()
        assert not any(pool.buffer.any() for pool in group.pools.values())
        release_and_resume(group.engine, path)
        assert tokens(group.engine, "after") == before


def test_mapped_memory_leaves_the_process_and_is_zero_when_it_comes_again() -> None:
    buffer = zeroed_bytes(SIZE, torch.device("cpu"))
    buffer.fill_(7)
    memory, address, process = MappedMemory([buffer]), buffer.data_ptr(), psutil.Process()
    full = process.memory_info().rss
    memory.release()
    assert process.memory_info().rss < full - SIZE // 2
    memory.resume()
    assert buffer.data_ptr() == address and not buffer.any()


class Saver:
    """What is called of torch_memory_saver."""

    hook_mode = "preload"

    def __init__(self) -> None:
        self.calls: list[str] = []

    @contextmanager
    def region(self, *, tag: str) -> Any:
        self.calls.append(f"region {tag}")
        yield

    def pause(self, tag: str) -> None:
        self.calls.append(f"pause {tag}")

    def resume(self, tag: str) -> None:
        self.calls.append(f"resume {tag}")


def test_saved_memory_is_zero_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    saver, library = Saver(), types.ModuleType("torch_memory_saver")
    library.torch_memory_saver = saver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_memory_saver", library)
    memory = SavedMemory()
    buffer = memory.allocate(64, torch.device("cpu"))
    memory.release()
    buffer.fill_(9)  # what a GPU's memory holds after another process had it
    memory.resume()
    assert saver.calls == ["region kv_cache", "pause kv_cache", "resume kv_cache"] and not buffer.any()
    assert saver.hook_mode == "torch"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    with pytest.raises(ConfigError, match=r"--enable-memory-saver: .* pip install torch-memory-saver"):
        SavedMemory()
