"""How a GPU's memory is shared out: by figures alone, and by a whole engine on a CPU whose memory a stand-in reads."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.backend import make_attention_backend
from engine.config import EngineConfig
from engine.device.memory_plan import MeasuredMemory, kv_pages
from engine.device.pools import why_kept
from engine.device.step_memory import LocalMachine, await_share
from engine.flags.resolve import resolve
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from engine.models.load import load_model
from service.flags import ConfigError
from tests.engine.engine_in_process import EngineInProcess
from tests.models.tiny_checkpoints import make_tiny_checkpoint

GIB = 1 << 30
H200 = int(139.8 * GIB)
CONTEXT = 0.75  # of CUDA, in GiB
QWEN, LLAMA, LLAMA_70B = (15.3, 144), (15.0, 128), (131.4, 320)  # GiB of weights, KiB of a token's KV


def config_of(**flags: Any) -> EngineConfig:
    config = EngineConfig(model_path=DEFAULT_MODEL_PATH, device="cuda", **flags)
    return resolve(config, load_model_config(DEFAULT_MODEL_PATH), cuda=True)


def memory_of(weights: float, *, steps: float = 2.0, graphs: float = 0.5, free: int = H200) -> MeasuredMemory:
    own, step, graph = (int(x * GIB) for x in (weights + CONTEXT, steps, graphs))
    return MeasuredMemory(
        memory=H200, free=free, weights=own, prompts=step, token_bytes=0, samples=step, graphs=graph, on_gpu=True
    )


def pages_of(found: MeasuredMemory, kib: int, **flags: Any) -> int:
    given = EngineConfig(model_path=DEFAULT_MODEL_PATH, device="cuda", **flags)
    return kv_pages(given, config_of(**flags), found, page_bytes=16 * kib << 10, states=0)


@pytest.mark.parametrize(
    ("share", "model", "thousands"),
    [
        (0.9, QWEN, 799),
        (0.9, LLAMA, 901),
        (0.45, QWEN, 341),  # two workers on one GPU
        (0.45, LLAMA, 386),
    ],
)
def test_tokens_of_an_h200(share: float, model: tuple[float, int], thousands: int) -> None:
    """Weights and KV take the share, as in SGLang; steps and graphs have the rest."""
    weights, kib = model
    flags = {"context_length": 1024, "max_running_requests": 1024}
    assert pages_of(memory_of(weights), kib, mem_fraction_static=share, **flags) * 16 // 1000 == thousands


def test_an_unset_share_leaves_the_steps_their_room() -> None:
    weights, kib = QWEN
    flags = {"context_length": 1024, "max_running_requests": 1024}
    usual = pages_of(memory_of(weights), kib, **flags)
    assert usual == pages_of(memory_of(weights), kib, mem_fraction_static=0.9, **flags)
    assert pages_of(memory_of(weights, steps=30.0), kib, **flags) * kib * 16 << 10 <= H200 - int(
        (weights + 31.25) * GIB
    )
    others = memory_of(weights, free=H200 - 60 * GIB)
    assert pages_of(others, kib, **flags) * kib * 16 << 10 <= others.most
    with pytest.raises(
        ConfigError, match=r"^--mem-fraction-static 0\.9: .* 125\.8 GiB, .* need 30\.5 .* at most 0\.78"
    ):
        pages_of(memory_of(weights, steps=30.0), kib, mem_fraction_static=0.9, **flags)


@pytest.mark.parametrize("share", [0.9, 0.95])
def test_a_model_that_leaves_too_little_is_refused_with_its_figures(share: float) -> None:
    """At 0.95 a 70B model would start with some thousand tokens."""
    weights, kib = LLAMA_70B
    with pytest.raises(ConfigError) as refused:
        pages_of(memory_of(weights), kib, mem_fraction_static=share)
    said = str(refused.value)
    assert said.startswith(f"--mem-fraction-static {share:g}: ")
    assert "weights 132.1" in said and "fewer than a step's" in said and "--max-total-tokens" in said
    assert pages_of(memory_of(weights), kib, mem_fraction_static=share, max_total_tokens=160) == 10


def test_defaults_of_each_device() -> None:
    on_gpu = config_of()
    assert (on_gpu.mem_fraction_static, on_gpu.max_running_requests) == (0.9, 256)
    on_cpu = resolve(EngineConfig(device="cpu"), load_model_config(DEFAULT_MODEL_PATH), cuda=False)
    assert (on_cpu.mem_fraction_static, on_cpu.max_running_requests) == (0.2, 64)
    assert config_of(mem_fraction_static=0.3, max_running_requests=7).max_running_requests == 7


class StandIn:
    """A gauge of a GPU whose memory others hold until they have been asked for `frees_after` times."""

    def __init__(self, *, total: int = 3 << 20, others: int = 0, frees_after: int | None = None, peak: int = 0) -> None:
        self._total, self._others, self._frees_after, self._peak = total, others, frees_after, peak
        self.calls: list[str] = []
        self.now_s = 0.0

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        self.calls.append("free")
        freed = self._frees_after is not None and self.calls.count("free") > self._frees_after
        return self._total - (0 if freed else self._others) - self.own()

    def own(self) -> int:
        return 1 << 20

    def begin_peak(self) -> None:
        self.calls.append("begin_peak")

    def peak(self) -> int:
        self.calls.append("peak")
        return self.own() + self._peak

    def release(self) -> None:
        self.calls.append("release")

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def wait(gauge: StandIn, share: float) -> None:
    await_share(gauge, share, clock=lambda: gauge.now_s, sleep=gauge.sleep)


def test_memory_that_comes_back_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    gauge = StandIn(total=100 * GIB, others=60 * GIB, frees_after=5)
    wait(gauge, 0.9)
    assert gauge.now_s == pytest.approx(2.5)
    assert [r.getMessage() for r in caplog.records] == [
        "GPU memory: others use 60.0 of 100.0 GiB; waiting up to 30 s for it"
    ]


def test_memory_of_others_is_named() -> None:
    gauge = StandIn(total=100 * GIB, others=60 * GIB)
    with pytest.raises(ConfigError) as refused:
        wait(gauge, 0.9)
    assert gauge.now_s == pytest.approx(30.0)
    said = str(refused.value)
    assert said.startswith("--mem-fraction-static 0.9: 90.0 of the GPU's 100.0 GiB") and "processes use 60.0" in said
    assert "at most 0.4 " in said and "restart the peer" in said
    wait(StandIn(total=100 * GIB, others=60 * GIB), 0.4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")


def start(checkpoint: str, gauge: StandIn, load: Callable[..., Any] = load_model, **flags: Any) -> EngineInProcess:
    flags = {"mem_fraction_static": 0.8, "max_total_tokens": None, "chunked_prefill_size": 64, **flags}
    flags |= {"disable_cuda_graph": True}
    return EngineInProcess(
        checkpoint,
        machine=LocalMachine(gauge=gauge, load=load),
        dtype="float32",
        max_running_requests=4,
        **{"context_length": 512, **flags},
    )


def test_an_engine_measures_its_largest_steps_before_it_has_a_pool(checkpoint: str) -> None:
    """The stand-in's GPU has 3 MiB, of which the context and the weights are said to take one."""
    loaded: list[list[str]] = []
    rows: list[tuple[int, int]] = []
    gauge = StandIn(peak=1 << 19)

    def load(*args: Any, **kwargs: Any) -> Any:
        loaded.append(list(gauge.calls))
        model = load_model(*args, **kwargs)
        forward = model.forward
        model.forward = lambda ids, *rest: rows.append((len(ids), gauge.calls.count("peak"))) or forward(ids, *rest)  # type: ignore[method-assign]
        return model

    with start(checkpoint, gauge, load) as engine:
        assert loaded == [["free"]], "the share is asked for before the weights are read"
        assert gauge.calls[1:] == ["release", "begin_peak", "peak", "release", "free"]
        assert max(n for n, _ in rows) == 68, "a chunk and a 16th"
        assert {after for n, after in rows if n == 68} == {0, 1}, "measured, and again on what serves"
        left = int(0.8 * (3 << 20)) - (1 << 20)
        assert engine.parts.pool.num_pages == left // engine.parts.pool.page_bytes
        engine.answer("r", [20, 30, 40])
    with EngineInProcess(checkpoint, dtype="float32") as plain:
        plain.answer("r", [20, 30, 40])
    assert engine.tokens == plain.tokens


def test_pools_of_windows_are_measured_and_share_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled for the strides of pages, so the pools of measured steps have the layers of those to come."""
    path = make_tiny_checkpoint(tmp_path, "gpt_oss", num_hidden_layers=3, sliding_window=22)
    seen: list[tuple[int, ...]] = []

    def noted(name: str, pool: KVPool, **more: Any) -> Any:
        seen.append((pool.num_layers, *pool.k(0).stride()))
        return make_attention_backend(name, pool, **more)

    monkeypatch.setattr("engine.device.forward_parts.make_attention_backend", noted)
    with start(path, StandIn(peak=1 << 18), page_size=4, context_length=4096) as engine:
        pools, memory = (engine.parts.pool, engine.parts.device.windows), engine.parts.memory
        assert len(seen) > 2 and sorted(layers for layers, *_ in set(seen)) == [1, 2], seen
    assert pools[1] is not None and engine.parts.behind_windows == "freed"
    left, page = int(0.8 * (3 << 20)) - (1 << 20), sum(pool.page_bytes for pool in pools if pool)
    assert memory["kv_pages"] == pools[0].buffer.nbytes and memory["window_pages"] == pools[1].buffer.nbytes
    assert left - page < memory["kv_pages"] + memory["window_pages"] <= left + page, "and the padding of each"


@pytest.mark.parametrize(("backend", "more"), [("auto", {}), ("triton", {}), ("torch", {"pp_size": 2})])
def test_kv_behind_windows_is_freed_on_a_gpu_as_on_a_cpu(backend: str, more: dict[str, Any]) -> None:
    spec = CacheSpec(2, 16, "bfloat16", window=64)
    config = config_of(attention_backend=backend, **more)
    assert why_kept(config, [spec], recurrent=False) == ("--pp-size 2" if more else "")


def test_a_pool_smaller_than_the_context_is_a_warning(checkpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    start(checkpoint, StandIn(total=2 << 20, peak=1 << 18), mem_fraction_static=0.65).close()
    said = [r.getMessage() for r in caplog.records]
    assert any("a KV cache of 304 tokens" in line for line in said)
    assert any("holds 304 tokens, the model's context 512" in line and "--context-length" in line for line in said)


def test_a_capacity_in_tokens_needs_no_measurement(checkpoint: str) -> None:
    gauge = StandIn(others=3 << 20)
    with start(checkpoint, gauge, max_total_tokens=160) as engine:
        assert engine.parts.pool.num_pages == 10 and gauge.calls == [] and "steps" not in engine.parts.memory


def test_steps_that_do_not_fit_name_their_flags(checkpoint: str) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        model = load_model(*args, **kwargs)

        def forward(ids: torch.Tensor, *rest: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")

        model.forward = forward  # type: ignore[method-assign, assignment]
        return model

    with pytest.raises(ConfigError, match=r"^--chunked-prefill-size, --max-running-requests: .*9\.00 GiB.*lower them"):
        start(checkpoint, StandIn(), load)


def test_weights_that_do_not_fit_name_the_model(checkpoint: str) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigError, match=r"^--model-path .*no memory for its weights"):
        start(checkpoint, StandIn(), load)
