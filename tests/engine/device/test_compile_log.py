"""Compilations while serving are heard by Triton's own hooks: a kernel compiled for an H200, and every kernel of an engine's steps."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from engine.attention.triton_backend import TritonBackend
from engine.executor.warm_up import CompileLog, WarmUp, by_executor, warm_up
from engine.kernels.triton.elementwise import TritonElementwise
from tests.engine.engine_in_process import EngineInProcess
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny_checkpoint


@triton.jit
def double_kernel(x_ptr, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, at < count), at < count)


class H200:
    """What Triton asks of a driver before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileLog]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", H200())
    compiles = CompileLog(clock=iter(float(i) for i in range(100_000)).__next__)
    yield compiles
    compiles.close()
    assert knobs.runtime.jit_cache_hook is knobs.runtime.jit_post_compile_hook is None


def test_a_kernel_compiled_while_serving_is_a_warning(heard: CompileLog, caplog: pytest.LogCaptureFixture) -> None:
    def launch(dtype: torch.dtype) -> None:
        double_kernel.warmup(dtype, 5, SIZE=16, grid=(1,))

    launch(torch.float32)
    heard.serve()
    launch(torch.float32)
    assert heard.num_late == 0
    launch(torch.float64)
    assert heard.num_late == 1
    (warned,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warned == (
        "kernel double_kernel was compiled while serving, in 1.0 s: x_ptr: *fp64, count: i32, SIZE: constexpr"
    )


def test_every_kernel_compile_of_an_engine_is_counted(
    heard: CompileLog, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hooks are called as for a compilation, with each kernel's own constants, and nothing is compiled."""
    launched: set[str] = set()

    def only_hooks(kernel: JITFunction, key: Any, *args: Any) -> None:
        signature, device, constants, options, attrs, warmup = args
        launched.add(kernel.fn.__name__)
        for hook in (knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook):
            target = [] if triton.__version__ < "3.7" else [H200().get_current_target()]
            kernel._call_hook(hook, key, signature, *target, device, constants, options, [attrs], warmup)

    monkeypatch.setattr(JITFunction, "_do_compile", only_hooks)
    monkeypatch.setattr(
        "engine.device.forward_parts.make_attention_backend",
        lambda name, pool, num_heads, needs: TritonBackend(pool, num_heads=num_heads),
    )
    monkeypatch.setattr(torch, "empty", torch.zeros)  # what a kernel leaves unwritten here must be a token
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr("engine.layers.linear.elementwise_for", lambda *_, **__: TritonElementwise())
    heard.serve()
    folder = make_tiny_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=1)
    steps = WarmUp(prompt_tokens=40, rows=2, positions=90, page_size=16, vocab_size=VOCAB_SIZE, mixed=True)
    with EngineInProcess(folder, dtype="float32", max_running_requests=2) as engine:
        warm_up(by_executor(engine.parts.device.executor), steps, progress=False)
    assert len(launched) > 5 and heard.num_late > 100
    named = {r.getMessage().split()[1] for r in caplog.records if "while serving" in r.getMessage()}
    assert named == launched
