"""Triton's sampler without a GPU: tokens by the interpreter, and what the compiler makes of the kernels for an H100/H200."""

import re
from typing import Any

import pytest

from engine.kernels.triton import sample
from engine.kernels.triton.sample import PARTS, ROW_TILE, ROW_WARPS, TILE, WARPS, part_of
from tests.attention.triton.interpreted import TIMEOUT_S, run_interpreted
from tests.attention.triton.test_triton import REGISTERS, check_compiled, own_directory  # noqa: F401 (a fixture of every test here)

VOCAB = 151936
TYPES = {
    **dict.fromkeys(["logits_ptr", "edited_ptr", "floats_ptr", "before_ptr", "peaks_ptr"], "*fp32"),
    **dict.fromkeys(["slots_ptr", "output_lens_ptr", "integers_ptr", "masses_ptr", "tokens_ptr"], "*i64"),
    **dict.fromkeys(["mask_rows_ptr", "masks_ptr", "ids_ptr", "bounds_ptr"], "*i32"),
    "bad_ptr": "*u8",
}
BY_PART = {"VOCAB": VOCAB, "PART": part_of(VOCAB), "PARTS": PARTS, "TILE": TILE}
BY_ROW = {"VOCAB": VOCAB, "PARTS": PARTS, "TILE": ROW_TILE}


@pytest.mark.timeout(TIMEOUT_S)
def test_tokens_by_the_interpreter() -> None:
    run_interpreted("tests.sampler.triton_cases")


@pytest.mark.parametrize(
    ("name", "constants", "warps"),
    [
        pytest.param(
            "peaks_kernel", {**BY_PART, "MASKED": False, "IS_FALLBACK": False}, WARPS, marks=pytest.mark.slow
        ),  # less than the next one
        ("peaks_kernel", {**BY_PART, "MASKED": True, "IS_FALLBACK": False}, WARPS),
        ("peaks_kernel", {**BY_PART, "MASKED": True, "IS_FALLBACK": True}, WARPS),
        ("top_k_kernel", {**BY_ROW, "MASKED": False}, ROW_WARPS),
        ("scores_kernel", {**BY_PART, "MASKED": False}, WARPS),
        ("finish_kernel", {**BY_ROW, "MASKED": True}, ROW_WARPS),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_sampling_compiles_for_sm_90_without_spills(name: str, constants: dict[str, Any], warps: int) -> None:
    kernel = getattr(sample, name)
    signature = {n: TYPES[n] for n in kernel.arg_names if n in TYPES}
    options = {"num_warps": warps, **sample.EXACT}
    made = check_compiled(kernel, signature, constants, aligned=[], **options)
    usage = made.usage
    # two programs of a row, or four of a part, share a multiprocessor
    assert usage["REG"] <= 128 and usage["REG"] * 32 * warps <= REGISTERS, usage
    ptx = made.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4", ptx), "logits are loaded one by one"
    for inexact in (r"fma\.rn", r"\.ftz", r"div\.(full|approx)", r"(ex2|lg2)\.approx"):
        assert not re.search(inexact, ptx), f"{inexact}: other bits than a CPU's"
