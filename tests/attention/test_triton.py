"""Triton kernels without a GPU: numerics by the interpreter, and what the compiler makes of them for an H100/H200."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton_decode import (
    LIST_TILE,
    cache_constants,
    decode_merge_kernel,
    decode_split_kernel,
    decode_tiles,
    merge_constants,
    split_constants,
    split_list_kernel,
    split_rule,
)
from engine.kernels.triton_elementwise import GATE_TILE, rms_norm_kernel, silu_mul_kernel
from engine.kernels.triton_extend import (
    extend_constants,
    extend_kernel,
    extend_merge_constants,
    extend_merge_kernel,
    extend_tiles,
)
from engine.kernels.triton_turn_write import HEAD_TILE, turn_write_kernel

ROOT = Path(__file__).parents[2]
SM_90 = GPUTarget("cuda", 90, 32)
SHARED_LIMIT_BYTES = 227 << 10  # of a multiprocessor
REGISTERS = 65536
STRIDES = ["page_stride", "q_stride"]  # multiples of 16
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES = {
    "Qwen3-0.6B": {"heads": 16, "kv_heads": 8, "dim": 128},
    "Llama-3.2-1B": {"heads": 32, "kv_heads": 8, "dim": 64},
    "Gemma-like": {"heads": 16, "kv_heads": 2, "dim": 256},
}


def test_numerics_by_the_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.attention.triton_numerics"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_decode_compiles_for_sm_90_without_spills(shape, dtype):
    signature = {
        **dict.fromkeys(["q_ptr", "k_ptr", "v_ptr"], f"*{dtype}"),
        **dict.fromkeys(["part_ptr", "lse_ptr"], "*fp32"),
        **dict.fromkeys(["list_ptr", "table_ptr"], "*i32"),
        **{"slots_ptr": "*i64", "kv_lens_ptr": "*i32"},
        **dict.fromkeys(["batch", "q_stride", "table_stride"], "i32"),
        **{"page_stride": "i64", "scale": "fp32"},
    }
    heads = SHAPES[shape]
    tiles = decode_tiles(kv_heads=heads["kv_heads"], dim=heads["dim"], dtype=TORCH_DTYPES[dtype])
    constants = split_constants(cache_constants(**heads, page_size=16, dtype=TORCH_DTYPES[dtype]), tiles)
    made = check_compiled(decode_split_kernel, signature, constants, aligned=STRIDES, **launch_of(tiles))
    assert made.metadata.shared * tiles.per_sm <= SHARED_LIMIT_BYTES
    assert made.usage["REG"] * 32 * tiles.warps * tiles.per_sm <= REGISTERS


def test_what_stands_around_decode_compiles_for_sm_90_without_spills():
    tiles = decode_tiles(kv_heads=8, dim=128, dtype=torch.bfloat16)
    signature = {"part_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16", "kv_lens_ptr": "*i32"}
    constants = merge_constants(heads=16, dim=128, tiles=tiles)
    check_compiled(decode_merge_kernel, signature, constants, aligned=[], warps=4, stages=2)
    signature = {"kv_lens_ptr": "*i32", "list_ptr": "*i32", "batch": "i32"}
    check_compiled(
        split_list_kernel, signature, {"TILE_BATCH": LIST_TILE, **split_rule(tiles)}, aligned=[], warps=1, stages=2
    )


def test_elementwise_kernels_compile_for_sm_90_without_spills():
    """Of Qwen3-8B."""
    pointers = dict.fromkeys(["x_ptr", "delta_ptr", "weight_ptr", "out_ptr"], "*bf16")
    signature = {**pointers, "width": "i32", "eps": "fp32"}
    check_compiled(rms_norm_kernel, signature, {"ADDS": True, "TILE": 4096}, aligned=["width"], warps=8, stages=3)
    signature = {**dict.fromkeys(["x_ptr", "out_ptr"], "*bf16"), "width": "i32"}
    check_compiled(silu_mul_kernel, signature, {"TILE": GATE_TILE}, aligned=["width"], warps=4, stages=3)


@pytest.mark.parametrize("norms", [False, True])
def test_the_turn_compiles_for_sm_90_without_spills(norms):
    """Of Qwen3-8B, or of Llama 3: no norm."""
    names = ["x_ptr", "weight_ptr", "cosine_ptr", "sine_ptr", "k_cache_ptr", "v_cache_ptr"]
    strides = {"x_stride": "i32", "turn_stride": "i32", "page_stride": "i64"}
    places = dict.fromkeys(["pages_ptr", "offsets_ptr"], "*i64")
    signature = {**dict.fromkeys(names, "*bf16"), **places, **strides, "eps": "fp32"}
    constants = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "NORMS": norms, "TILE": 64, "TILE_HEADS": HEAD_TILE}
    made = check_compiled(turn_write_kernel, signature, constants, aligned=list(strides), warps=4, stages=3)
    stores = re.findall(r"st\.global\S*", made.asm["ptx"])
    assert len(stores) == 6 and all(".v4" in store or ".v2" in store for store in stores), stores


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("split", [False, True])
def test_extend_compiles_for_sm_90_without_spills(shape, dtype, split):
    signature = {
        **dict.fromkeys(["q_ptr", "k_ptr", "v_ptr"], f"*{dtype}"),
        **dict.fromkeys(["out_ptr", "lse_ptr"], "*fp32" if split else f"*{dtype}"),
        **{"units_ptr": "*i32", "table_ptr": "*i32", "slots_ptr": "*i64"},
        **dict.fromkeys(["starts_ptr", "kv_lens_ptr"], "*i32"),
        **{"q_stride": "i32", "table_stride": "i32", "page_stride": "i64", "scale": "fp32"},
    }
    tiles = extend_tiles(dim=SHAPES[shape]["dim"], dtype=TORCH_DTYPES[dtype])
    constants = extend_constants(
        cache_constants(**SHAPES[shape], page_size=16, dtype=TORCH_DTYPES[dtype]), tiles, split=split
    )
    made = check_compiled(extend_kernel, signature, constants, aligned=STRIDES, **launch_of(tiles))
    if dtype == "bf16":
        assert "wgmma" in made.asm["ptx"], "Hopper's own products are idle"
        assert made.usage["REG"] <= REGISTERS // (32 * tiles.warps), made.usage


def test_the_merge_of_extend_compiles_for_sm_90_without_spills():
    """Of Qwen3-8B."""
    tiles = extend_tiles(dim=128, dtype=torch.bfloat16)
    signature = {
        **dict.fromkeys(["part_ptr", "lse_ptr"], "*fp32"),
        **{"out_ptr": "*bf16", "merges_ptr": "*i32", "starts_ptr": "*i32"},
    }
    constants = extend_merge_constants(heads=32, kv_heads=8, dim=128, tiles=tiles)
    made = check_compiled(extend_merge_kernel, signature, constants, aligned=[], warps=4, stages=3)
    assert made.usage["REG"] <= 128, made.usage


def launch_of(tiles: Any) -> dict[str, int]:
    return {"warps": tiles.warps, "stages": tiles.stages}


@dataclass
class Made:
    asm: dict[str, Any]
    metadata: Any
    usage: dict[str, int]


def check_compiled(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    aligned: list[str],
    warps: int,
    stages: int,
    streams: bool = True,
) -> Made:
    """Compile as a launch would: pointers, and the scalars named in `aligned`, are multiples of 16.

    `streams`: it multiplies what it loads in a loop.
    """
    names = kernel.arg_names
    assert [n for n in names if n not in constants] == list(signature)
    whole = {n: signature.get(n, "constexpr") for n in names}
    divisible = [n for n in names if whole[n].startswith("*") or n in aligned]
    source = ASTSource(
        fn=kernel,
        signature=whole,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in divisible},
    )
    compiled = triton.compile(source, target=SM_90, options={"num_warps": warps, "num_stages": stages})
    assert compiled.metadata.shared <= SHARED_LIMIT_BYTES
    usage = resource_usage(compiled.asm["cubin"])
    assert usage["STACK"] == 0 and usage["LOCAL"] == 0, usage
    if signature.get("k_ptr") == "*bf16" and streams:
        assert "mma" in compiled.asm["ptx"], "tensor cores are idle"
        assert "cp.async" in compiled.asm["ptx"], "loads are not pipelined"
    return Made(compiled.asm, compiled.metadata, usage)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """What cuobjdump (in the Triton wheel) says of the only function: registers, stack (spills), local memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = Path(os.environ["TRITON_TEST_DIR"]) / "kernel.cubin"
    path.write_bytes(cubin)
    done = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, timeout=60, check=True)
    found = re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", done.stdout)
    assert found, done.stdout
    return {name: int(value) for name, value in found}


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_TEST_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
