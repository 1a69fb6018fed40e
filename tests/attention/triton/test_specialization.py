"""Serving compiles nothing anew: Triton compiles a kernel again for another class of an integer, a type or a constant."""

import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, KernelParam, create_function_from_signature

from engine.attention.triton_backend import TritonBackend
from engine.core.plan import Plan, PlanItem
from engine.executor.forward import FutureMap
from engine.executor.forward_pass import ForwardPass
from engine.executor.graphs import DecodeGraphs, GraphRecorder, PrefillGraphs, SampledEnd, Work
from engine.executor.layer_marks import LayerMarks
from engine.kernels.triton.elementwise import TritonElementwise
from engine.kv.kv_pool import KVPool
from engine.kv.page_copies import Arrival
from engine.kv.step_batch import PageTable
from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.sampler.triton_sampler import TritonSampler
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny_checkpoint

ROOT = Path(__file__).parents[3]
# Integers of a launch that one model never changes. All others are in `do_not_specialize`.
CONSTANTS_OF_A_MODEL = {
    "page_stride": "bytes of a page of all layers",
    "unit_stride": "bytes of a unit of all layers",
    "page_grains": "the same, in grains",
    "unit_grains": "the same, in grains",
    "q_stride": "heads of q, k and v together",
    "x_stride": "the same, or the input of a site of adapters",
    "y_stride": "output of a site of adapters",
    "turn_stride": "cosine and sine of a position",
    "width": "hidden size, or intermediate size",
}
FLOATS = {"scale", "eps", "offset"}  # Triton specialises no float
MOST_TOKENS, MAX_REQUESTS, PAGE_SIZE = 4000, 40, 16
VARIANTS = {
    "split_list_kernel": 1,
    "decode_split_kernel": 1,
    "extend_kernel": 2,  # whole, and split over the context
    "extend_merge_kernel": 1,
    "rms_norm_kernel": 2,  # alone, and of a sum
    "rope_write_kernel": 1,
    "silu_mul_kernel": 1,
    "peaks_kernel": 1,
    "top_k_kernel": 1,
    "scores_kernel": 1,
    "finish_kernel": 1,
}


def kernels() -> dict[str, JITFunction]:
    """What the engine launches."""
    modules = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "engine/kernels/triton").glob("[!_]*.py")]
    found = {}
    for module in (import_module(".".join(path.parts)) for path in sorted(modules)):
        found |= {
            name: x for name, x in vars(module).items() if isinstance(x, JITFunction) and name.endswith("_kernel")
        }
    return found


def specializes(param: KernelParam) -> bool:
    return not (param.is_constexpr or param.do_not_specialize or param.name.endswith("_ptr"))


@pytest.mark.parametrize("name", kernels())
def test_only_constants_of_a_model_are_specialized(name: str) -> None:
    integers = {p.name for p in kernels()[name].params if specializes(p)} - FLOATS
    assert integers <= set(CONSTANTS_OF_A_MODEL), "not constant in a model, and not in do_not_specialize"


def test_a_day_of_any_shapes_compiles_each_kernel_a_stated_number_of_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys: dict[str, set[str]] = defaultdict(set)
    monkeypatch.setattr(JITFunction, "run", recorder(keys))
    for layer in ("linear", "norm"):
        monkeypatch.setattr(f"engine.layers.{layer}.elementwise_for", lambda *_, **__: TritonElementwise())
    folder = make_tiny_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    model = load_model(folder, load_model_config(folder), dtype="float32", device="cpu", progress=False)
    day = Day(model, random.Random(0))
    for _ in range(60):
        day.step()
    assert {name: len(found) for name, found in keys.items()} == VARIANTS, dict(keys)


def recorder(keys: dict[str, set[str]]) -> Callable[..., None]:
    """In place of a launch: adds the key that Triton would look a compiled kernel up by on an H200."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binders: dict[JITFunction, Any] = {}

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if kernel not in binders:
            binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binders[kernel](*args, **kwargs)
        keys[kernel.__name__].add(f"{specialization} {options}")

    return run


class Anew:
    """Records nothing and does the work anew: what a graph computes."""

    def capture(self, work: Work) -> Work:
        return work


class Day:
    """Steps of requests that come, grow and go, as a scheduler plans them: eager, and of recorded sizes."""

    def __init__(self, model: DenseDecoder, rng: random.Random) -> None:
        self._model, self._rng, self._seq = model, rng, 0
        cpu = torch.device("cpu")
        pool = KVPool(model.cache_specs(), num_pages=20, page_size=PAGE_SIZE, device=cpu)
        table = PageTable(num_slots=64, max_pages=MOST_TOKENS // PAGE_SIZE, page_size=PAGE_SIZE, device=cpu)
        future_map, backend = FutureMap.on(cpu, num_slots=64), TritonBackend(pool, num_heads=4)
        recorder = GraphRecorder(Anew, backend, table, future_map)
        end = SampledEnd(TritonSampler(num_slots=64, vocab_size=VOCAB_SIZE, device=cpu), future_map, device=cpu)
        graphs = DecodeGraphs([1, 2, 4, 7], recorder, end=end)
        make = partial(ForwardPass, backend=backend, page_table=table, inputs=future_map, layers=LayerMarks(cpu))
        prompts = PrefillGraphs([16, 64, 300], recorder)
        self._eager, self._recorded = make(), make(recorded=[graphs, prompts])
        self._recorded.record(model)

    def step(self) -> None:
        self._seq += 1
        kind = self._rng.choice(["prompts", "decode", "mixed"])
        count = self._rng.choice([1, 2, 16, self._rng.randint(1, MAX_REQUESTS)])
        slots = self._rng.sample(range(64), count)
        items = [
            self._item(slot, prompt=kind == "prompts" or (kind == "mixed" and i == 0)) for i, slot in enumerate(slots)
        ]
        forward = self._rng.choice([self._eager, self._recorded])
        forward.run(self._model, Plan(self._seq, kind != "decode", items), Arrival())

    def _item(self, slot: int, *, prompt: bool) -> PlanItem:
        most = self._rng.choice([1, 16, 17, 512, MOST_TOKENS])
        kv_len = self._rng.randint(1, most)
        q_len = self._rng.choice([1, min(16, kv_len), self._rng.randint(1, min(kv_len, 300))]) if prompt else 1
        return PlanItem(
            rid=str(slot),
            slot=slot,
            tokens=[0] * q_len,
            start=kv_len - q_len,
            page_start=0,
            new_pages=[1] * -(-kv_len // PAGE_SIZE),
            sample=True,
            output_len=0,
            extend=prompt,
        )
