"""Serving compiles nothing anew: Triton compiles a kernel again for another class of an integer, a type or a constant."""

import random
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, KernelParam, create_function_from_signature

from engine.kernels.triton.elementwise import TritonElementwise
from engine.layers.linear import _GpuMatrix
from engine.model_files.model_config import load_model_config
from engine.models.load import load_model
from tests.attention.triton.day_of_steps import Day
from tests.models.tiny_checkpoints import make_tiny_checkpoint

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
    **dict.fromkeys(["latents_stride", "rotary_stride"], "a product of latents or queries"),
    "token_stride": "a token's latents in a page",
    "slot_stride": "a recurrent state of all layers",
    **dict.fromkeys(["gates_stride", "z_stride", "time_stride", "gate_stride"], "a recurrent layer's product"),
    **dict.fromkeys(["width", "q_width", "k_width"], "hidden or intermediate size, or of all heads"),
    "outputs": "of a packed matrix",
}
FLOATS = {
    "scale",
    "eps",
    "inner_eps",
    "offset",
    "inner_offset",
    "alpha",
    "limit",
    "shortest",
    "longest",
}  # Triton specialises no float
VARIANTS = {
    "split_list_kernel": 1,
    "decode_split_kernel": 1,
    "extend_kernel": 2,  # whole, and split over the context
    "extend_merge_kernel": 1,
    "rms_norm_kernel": 2,  # alone, and of a sum
    "rope_write_kernel": 1,
    "gate_kernel": 1,
    "peaks_kernel": 1,
    "top_k_kernel": 1,
    "scores_kernel": 1,
    "finish_kernel": 1,
}
MIXTURE_VARIANTS = {name: count for name, count in VARIANTS.items() if name != "gate_kernel"} | {
    "route_kernel": 2,  # all rows count, or the first of a graph
    "sort_kernel": 1,  # fp32 has one kind of tile
    "up_kernel": 2,  # few pairs, and sorted ones
    "down_kernel": 2,
    "sum_kernel": 1,
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


# QKV of the first layer and of others, out, gate_up, down before a norm and the last, for three sizes of rows; a small head.
PRODUCT_VARIANTS = {**VARIANTS, "linear_kernel": 6 * 3 + 1}


@pytest.mark.parametrize(
    ("family", "variants", "streams"),
    [("qwen3", VARIANTS, False), ("qwen3", PRODUCT_VARIANTS, True), ("qwen3_moe", MIXTURE_VARIANTS, False)],
)
def test_a_day_of_any_shapes_compiles_each_kernel_a_stated_number_of_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, variants: dict[str, int], streams: bool
) -> None:
    keys: dict[str, set[str]] = defaultdict(set)
    monkeypatch.setattr(JITFunction, "run", recorder(keys))
    monkeypatch.setattr("engine.layers.linear.elementwise_for", lambda *_, **__: TritonElementwise())
    monkeypatch.setattr("engine.models.expert_mlp.takes_triton", lambda _: True)
    if streams:
        monkeypatch.setattr("engine.layers.linear._matrix", lambda weight, bias, _: _GpuMatrix(weight, bias))
    folder = make_tiny_checkpoint(tmp_path, family, num_hidden_layers=2)
    model = load_model(folder, load_model_config(folder), dtype="float32", device="cpu", progress=False)
    day = Day(model, random.Random(0))
    for _ in range(60):
        day.step()
    assert {name: len(found) for name, found in keys.items()} == variants, dict(keys)


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
