"""Quantized matrices on a GPU, without one: numerics by the interpreter, and what the compiler makes of the kernels for an H100/H200."""

import re
from typing import Any

import pytest
import torch

from engine.kernels.triton.packed_linear import (
    BLOCK,
    SUM_TILE,
    TILE,
    packed_dense_kernel,
    packed_linear_kernel,
    packed_sum_kernel,
    product_constants,
)
from tests.attention.triton.interpreted import run_interpreted
from tests.attention.triton.test_triton import check_compiled, of_cubin, own_directory  # noqa: F401 (a fixture)
from tests.cells import some

# Of a layer: inputs of a group, factors for each output or for BLOCK of them, zero points, outputs and inputs.
LAYERS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3, fp8 blocks": {"form": "e4m3", "group": 128, "factors": 1, "inputs": 7168},
    "Qwen3-8B, fp8 outputs": {"form": "e4m3", "group": 4096, "factors": BLOCK, "inputs": 4096},
    "Qwen3-8B, AWQ": {"form": "int4", "group": 128, "factors": BLOCK, "inputs": 4096, "zeros": True},
    "Qwen3-8B, GPTQ": {"form": "int4", "group": 128, "factors": BLOCK, "inputs": 12288},
    "groups of 32": {"form": "int4", "group": 32, "factors": BLOCK, "inputs": 4096, "zeros": True},
    "Qwen3-8B, int8": {"form": "int8", "group": 4096, "factors": BLOCK, "inputs": 4096},
    "gpt-oss, MXFP4": {"form": "e2m1", "group": 32, "factors": BLOCK, "inputs": 2880},
}
SIZES = dict.fromkeys(["rows", "width", "outputs", "tiles", "split_tiles", "groups", "x_stride"], "i32")
CASES = [(layer, rows) for layer in LAYERS for rows in (16, 32, 256)]
TRIED = [("DeepSeek-V3, fp8 blocks", 16), ("Qwen3-8B, AWQ", 256)]


def test_numerics_by_the_interpreter() -> None:
    run_interpreted("tests.quant.triton_packed")


def constants_of(form: str, *, group: int, factors: int, inputs: int, zeros: bool = False) -> dict[str, Any]:
    parts, tile = 4 if form in ("int4", "e2m1") else 2, min(TILE, group)
    sizes = {"PARTS": parts, "TILE": tile, "BLOCK": BLOCK, "GROUP_TILES": group // tile}
    return {"FORM": form, **sizes, "FACTORS": factors, "ZEROS": zeros}


@pytest.mark.parametrize(("layer", "rows"), some(CASES, tried=TRIED))
def test_products_compile_for_sm_90_without_spills(layer: str, rows: int) -> None:
    matrix = constants_of(**LAYERS[layer])
    constants = product_constants(matrix, rows, LAYERS[layer]["inputs"], torch.bfloat16)
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
    sass = of_cubin(made.asm["cubin"], "-sass")
    wide = len(re.findall(r"LDGSTS\.E\.BYPASS\.128", sass))
    sizes = [
        constants["TILE_N"] * constants["TILE"] * 2,
        *[constants["TILE_M"] * constants["TILE"] * 2] * constants["PARTS"],
    ]
    assert wide == stages * sum(size // 16 // (32 * warps) for size in sizes), "narrow copies of weights or inputs"
    assert "HGMMA" in sass and "LDSM" in sass and "F2F." not in sass, (
        "Hopper's own products are idle, or steps are slow"
    )
    assert not re.search(r"LDG\.", sass), "a load that is not made ahead"


def test_sums_and_dense_parts_compile_for_sm_90_without_spills() -> None:
    signature = {"parts_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    signature |= dict.fromkeys(["rows", "splits", "outputs"], "i32")
    check_compiled(packed_sum_kernel, signature, {"TILE": SUM_TILE}, aligned=["outputs"], num_warps=4, num_stages=3)
    signature = {"words_ptr": "*i32", "factors_ptr": "*i32", "out_ptr": "*bf16"}
    signature |= dict.fromkeys(["first", "width", "tiles", "groups"], "i32")
    constants = constants_of(**LAYERS["DeepSeek-V3, fp8 blocks"])
    check_compiled(packed_dense_kernel, signature, constants, aligned=["width"], num_warps=4, num_stages=3)
