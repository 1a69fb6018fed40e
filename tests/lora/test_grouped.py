"""Grouped kernels of adapters: numerics by the interpreter, and what the compiler makes of them for an H100/H200."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels.triton_lora import (
    DECODE_TILES,
    EXTEND_TILES,
    LoraTiles,
    expand_constants,
    lora_expand_kernel,
    lora_shrink_kernel,
    shrink_constants,
    site_constants,
)
from tests.attention.test_triton import Made, check_compiled, own_directory  # noqa: F401 (a fixture of every test here)

ROOT = Path(__file__).parents[2]
SITES = {"qkv": (4096, [4096, 1024, 1024]), "down": (12288, [4096])}  # of Qwen3-8B
SHAPES = {"decode": DECODE_TILES, "extend": EXTEND_TILES}
MOST_REGISTERS = {"decode": 96, "extend": 168}


def test_adapters_by_the_interpreter() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.lora.grouped_by_the_interpreter"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("site", SITES)
def test_they_compile_for_sm_90_without_spills(site: str, shape: str) -> None:
    (width, parts), tiles = SITES[site], SHAPES[shape]
    constants = site_constants(width=width, rows=parts, sites=144, max_rank=64, dtype=torch.bfloat16)
    for made in (shrink(constants, width, tiles), expand(constants, parts, tiles)):
        assert "mma" in made.asm["ptx"], "tensor cores are idle"
        assert "cp.async" in made.asm["ptx"] and "ld.global.b16" not in made.asm["ptx"], "loads are narrow"
        assert made.usage["REG"] <= MOST_REGISTERS[shape], made.usage


def shrink(site: dict[str, int], width: int, tiles: LoraTiles) -> Made:
    signature = {"x_ptr": "*bf16", "low_ptr": "*fp32", **PLANNED, "x_stride": "i32"}
    constants = shrink_constants(site, width=width, tiles=tiles)
    return compiled(lora_shrink_kernel, signature, constants, tiles, aligned=["x_stride"])


def expand(site: dict[str, int], parts: list[int], tiles: LoraTiles) -> Made:
    signature = {"low_ptr": "*fp32", "y_ptr": "*bf16", **PLANNED, "y_stride": "i32"}
    constants = expand_constants(site, rows=parts, tiles=tiles)
    return compiled(lora_expand_kernel, signature, constants, tiles, aligned=["y_stride"])


PLANNED = {"table_ptr": "*i64", "tiles_ptr": "*i32", "rows_ptr": "*i32", "total": "i32"}


def compiled(
    kernel: object, signature: dict[str, str], constants: dict[str, int], tiles: LoraTiles, *, aligned: list[str]
) -> Made:
    launch = {"warps": tiles.warps, "stages": tiles.stages}
    return check_compiled(kernel, signature, constants, aligned=aligned, **launch, streams=False)  # type: ignore[no-any-return]
