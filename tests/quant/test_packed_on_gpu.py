"""Quantized matrices on a GPU, without one: numerics by the interpreter, and what the compiler makes of the kernels for an H100/H200."""

import re
from itertools import product
from typing import Any

import pytest
import torch

from engine.kernels.triton.experts import PACKED_INPUTS, expert_tiles
from engine.kernels.triton.packed import BLOCK, TILE, PackedForm, packed, packed_dense_kernel
from engine.kernels.triton.packed_linear import (
    SUM_TILE,
    TILE_INPUTS,
    packed_linear_kernel,
    packed_sum_kernel,
    product_constants,
)
from engine.quant.integers import Weight
from tests.attention.triton.interpreted import TIMEOUT_S, run_interpreted
from tests.attention.triton.test_triton import (
    MIXTURES,
    STEPS,
    Made,
    check_compiled,
    compiled_products,
    of_cubin,
    own_directory,  # noqa: F401 (a fixture)
)
from tests.cells import some
from tests.quant.packed_weights import weights

# Of a layer: inputs of a group, outputs of a block with factors of their own (default: each), zero points, inputs.
LAYERS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3, fp8 blocks": {"numbers": "e4m3", "group": 128, "each": 1, "inputs": 7168},
    "Qwen3-8B, fp8 outputs": {"numbers": "e4m3", "group": 4096, "inputs": 4096},
    "Qwen3-8B, AWQ": {"numbers": "int4", "group": 128, "inputs": 4096, "zeros": "points"},
    "Qwen3-8B, GPTQ": {"numbers": "int4", "group": 128, "inputs": 12288},
    "groups of 32": {"numbers": "int4", "group": 32, "inputs": 4096, "zeros": "points"},
    "Qwen3-8B, Q4_K": {"numbers": "int4", "group": 32, "inputs": 4096, "zeros": "offsets"},
    "Qwen3-8B, Q8_0": {"numbers": "int8", "group": 32, "inputs": 4096},
    "Qwen3-8B, int8": {"numbers": "int8", "group": 4096, "inputs": 4096},
    "gpt-oss, MXFP4": {"numbers": "e2m1", "group": 32, "inputs": 2880},
}
SIZES = dict.fromkeys(["rows", "width", "outputs", "tiles", "split_tiles", "of_output", "x_stride"], "i32")
CASES = [(layer, rows) for layer in LAYERS for rows in (16, 32, 256)]
TRIED = [("DeepSeek-V3, fp8 blocks", 16), ("Qwen3-8B, AWQ", 256)]


@pytest.mark.timeout(TIMEOUT_S)
def test_numerics_by_the_interpreter() -> None:
    run_interpreted(*(f"tests.quant.triton_packed{of}" for of in ("", "_experts", "_mixtures")))


def form_of(
    numbers: str, *, group: int, each: int = BLOCK, zeros: str = "", most: int = TILE_INPUTS, **_: int
) -> PackedForm:
    parts = 2 if numbers in ("e4m3", "int8") else 4
    tile = min(TILE, group, most // parts)
    of_group = 1 if numbers == "e2m1" else group // tile
    return PackedForm(numbers, parts, tile, of_group, zeros, each)


@pytest.mark.parametrize(("layer", "rows"), some(CASES, tried=TRIED))
def test_products_compile_for_sm_90_without_spills(layer: str, rows: int) -> None:
    form = form_of(**LAYERS[layer])
    constants = product_constants(form, rows, LAYERS[layer]["inputs"], torch.bfloat16)
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    signature = {"x_ptr": "*bf16", "words_ptr": "*i32", "factors_ptr": "*i32", "y_ptr": "*bf16", **SIZES}
    made = check_compiled(
        packed_linear_kernel,
        signature,
        {"bias_ptr": None, **constants},
        aligned=["width", "outputs", "x_stride"],
        num_warps=warps,
        num_stages=stages,
    )
    sizes = constants["TILE_N"], constants["TILE_M"], warps, stages
    sass = check_products(made, form, *sizes)
    assert not re.search(r"LDG\.", sass), "a load that is not made ahead"


def check_products(made: Made, form: PackedForm, outputs: int, rows: int, warps: int, stages: int) -> str:
    """SASS of a product of a tile."""
    sass = of_cubin(made.asm["cubin"], "-sass")
    wide, every = (len(re.findall(rf"LDGSTS\.E{kind}", sass)) for kind in (r"\.BYPASS\.128", ""))
    sizes = [outputs * form.tile * 2, *[rows * form.tile * 2] * form.parts]
    assert wide == stages * sum(size // 16 // (32 * warps) for size in sizes), "narrow copies of weights or inputs"
    assert every > wide, "factors that are not loaded ahead"
    assert "HGMMA" in sass and "LDSM" in sass and "F2F." not in sass, (
        "Hopper's own products are idle, or steps are slow"
    )
    return sass


# Bits of a number, with its part of 16 or 8 bits of a scale; ours have 32 bits for integers.
BITS = {"mxfp4": 4.25, "fp8, blocks": 8 + 2 * 32 / (64 * 128), "int4, zeros": 4 + 32 / 64, "int8": 8 + 32 / 256}


@pytest.mark.parametrize("form", BITS)
def test_experts_take_no_more_memory_than_they_are_stored_in(form: str) -> None:
    """Beside the last tile of inputs, as 2880 of gpt-oss are 22.5 tiles."""
    for inputs, rest in ((256, 1.0), (2880, 2944 / 2880)):
        both: list[Weight] = [weights((128, inputs), torch.bfloat16)[form] for _ in range(3)]
        stack = packed(both, inputs=PACKED_INPUTS, alternates=True)
        assert not both and stack is not None and stack.factors is not None
        bits = 8 * (stack.weight.nbytes + stack.factors.nbytes) / (3 * 128 * inputs)
        assert bits <= BITS[form] * rest + 1e-9


@pytest.mark.parametrize("step", STEPS)
def test_pairs_are_sorted_for_dense_and_packed_matrices_at_once(step: str) -> None:
    """Where ranks cut blocks of MXFP4, down is dense and gate and up are packed."""
    pairs = STEPS[step] * 32
    of_dense, of_packed = (expert_tiles(pairs, 32, torch.bfloat16, packed=packed) for packed in (False, True))
    assert of_dense.rows == of_packed.rows


EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss-20b": ("gpt-oss-20b", LAYERS["gpt-oss, MXFP4"]),
    "GLM-4.5, fp8 blocks": ("GLM-4.5", {"numbers": "e4m3", "group": 128, "each": 2}),
    "Qwen3-30B-A3B, fp8 tensors": ("Qwen3-30B-A3B", {"numbers": "e4m3", "group": 1 << 20, "each": 2}),
    "Qwen3-30B-A3B, AWQ": ("Qwen3-30B-A3B", LAYERS["Qwen3-8B, AWQ"]),
    "Qwen3-30B-A3B, GPTQ": ("Qwen3-30B-A3B", LAYERS["Qwen3-8B, GPTQ"]),
    "Qwen3-30B-A3B, int4wo-32": ("Qwen3-30B-A3B", LAYERS["Qwen3-8B, Q4_K"]),
    "Qwen3-30B-A3B, int8": ("Qwen3-30B-A3B", LAYERS["Qwen3-8B, int8"]),
}
STEPS_TRIED = [("gpt-oss-20b", "few"), ("Qwen3-30B-A3B, AWQ", "long"), ("GLM-4.5, fp8 blocks", "mid")]


@pytest.mark.parametrize(
    ("experts", "step"), some(product(EXPERTS, ("few", "short", "mid", "long")), tried=STEPS_TRIED)
)
def test_packed_experts_compile_for_sm_90_without_spills(experts: str, step: str) -> None:
    model, layer = EXPERTS[experts]
    form = form_of(**layer, most=PACKED_INPUTS)
    for made, tiles in compiled_products("bf16", step, MIXTURES[model], form=form):
        check_products(made, form, tiles.columns, tiles.rows, tiles.warps, tiles.stages)


def test_sums_and_dense_parts_compile_for_sm_90_without_spills() -> None:
    signature = {"parts_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    signature |= dict.fromkeys(["rows", "splits", "outputs"], "i32")
    check_compiled(packed_sum_kernel, signature, {"TILE": SUM_TILE}, aligned=["outputs"], num_warps=4, num_stages=3)
    signature = {"words_ptr": "*i32", "factors_ptr": "*i32", "out_ptr": "*bf16"}
    signature |= dict.fromkeys(["first", "width", "tiles", "factors"], "i32")
    constants = {"FORM": form_of(**LAYERS["DeepSeek-V3, fp8 blocks"])}
    check_compiled(packed_dense_kernel, signature, constants, aligned=["width"], num_warps=4, num_stages=3)
