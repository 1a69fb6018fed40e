"""Triton kernels without a GPU: numerics by the interpreter, and what the compiler makes of them for an H100/H200."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton_decode import (
    NUM_STAGES,
    decode_merge_kernel,
    decode_split_kernel,
    merge_constants,
    num_warps,
    split_constants,
)
from engine.kernels.triton_extend import NUM_STAGES as EXTEND_STAGES
from engine.kernels.triton_extend import extend_constants, extend_kernel, tile_shape

ROOT = Path(__file__).parents[2]
SM_90 = GPUTarget("cuda", 90, 32)
SHARED_LIMIT_BYTES = 227 << 10
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
        **dict.fromkeys(["table_ptr", "kv_lens_ptr"], "*i32"),
        "table_stride": "i32",
        "page_stride": "i64",
        "num_splits": "i32",
        "scale": "fp32",
    }
    warps = num_warps(SHAPES[shape]["dim"], TORCH_DTYPES[dtype])
    constants = split_constants(**SHAPES[shape], page_size=16, precision=_precision(dtype))
    check_compiled(decode_split_kernel, signature, constants, aligned=["page_stride"], warps=warps, stages=NUM_STAGES)


def test_merge_compiles_for_sm_90_without_spills():
    signature = {
        "part_ptr": "*fp32",
        "lse_ptr": "*fp32",
        "out_ptr": "*bf16",
        "kv_lens_ptr": "*i32",
        "num_splits": "i32",
    }
    check_compiled(decode_merge_kernel, signature, merge_constants(heads=16, dim=128), aligned=[], warps=2, stages=2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_extend_compiles_for_sm_90_without_spills(shape, dtype):
    signature = {
        **dict.fromkeys(["q_ptr", "k_ptr", "v_ptr", "out_ptr"], f"*{dtype}"),
        **dict.fromkeys(["table_ptr", "starts_ptr", "kv_lens_ptr"], "*i32"),
        "table_stride": "i32",
        "page_stride": "i64",
        "scale": "fp32",
    }
    rows, block, warps = tile_shape(SHAPES[shape]["dim"], TORCH_DTYPES[dtype])
    constants = extend_constants(
        **SHAPES[shape], page_size=16, precision=_precision(dtype), block_rows=rows, block=block
    )
    check_compiled(extend_kernel, signature, constants, aligned=["page_stride"], warps=warps, stages=EXTEND_STAGES)


def _precision(dtype: str) -> str:
    return "ieee" if dtype == "fp32" else "tf32"


def check_compiled(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], *, aligned: list[str], warps: int, stages: int
) -> None:
    """Compile as a launch would: pointers, and the scalars named in `aligned`, are multiples of 16."""
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
    if signature.get("k_ptr") == "*bf16":
        assert "mma" in compiled.asm["ptx"], "tensor cores are idle"
        assert "cp.async" in compiled.asm["ptx"], "loads are not pipelined"


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
