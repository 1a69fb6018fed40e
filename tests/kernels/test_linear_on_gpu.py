"""Decode products on a GPU, without one: numerics by the interpreter, and what the compiler makes of them for an H100/H200."""

import re
from dataclasses import replace

import pytest
import torch

from engine.kernels.triton.linear import (
    MAX_ROWS,
    StreamedLinear,
    launch_options,
    linear_kernel,
    linear_tiles,
    streams,
    tile_constants,
)
from tests.attention.triton.interpreted import TIMEOUT_S, run_interpreted
from tests.attention.triton.test_triton import (
    Made,
    check_compiled,
    check_last_split_sees_all,
    of_cubin,
    own_directory,  # noqa: F401 (a fixture)
)
from tests.cells import some

# Outputs and inputs, and what is fused.
MATRICES: dict[str, tuple[int, int, frozenset[str]]] = {
    "Qwen3-8B, qkv": (6144, 4096, frozenset({"norm"})),
    "Qwen2.5-7B, qkv": (4608, 3584, frozenset({"norm", "bias"})),
    "Qwen3-8B, out": (4096, 4096, frozenset({"sum"})),
    "Qwen3-8B, gate_up": (24576, 4096, frozenset({"norm", "silu"})),
    "Gemma 2B, gate_up": (32768, 2048, frozenset({"norm", "gelu_tanh"})),
    "Qwen3-8B, down": (4096, 12288, frozenset({"sum"})),
    "Qwen3-0.6B, down": (1024, 3072, frozenset({"sum"})),
    "DeepSeek-V2-Lite, latents": (576, 2048, frozenset()),
}
CASES = [(name, rows) for name in MATRICES for rows in (16, 32, 64)]
TRIED = [("Qwen3-8B, out", 16), ("Qwen3-8B, gate_up", 64), ("Qwen2.5-7B, qkv", 32)]
MULTIPROCESSOR = {"registers": 65536, "shared": 227 << 10}
AT_ONCE = {16: 3, 32: 3, 64: 2}  # programs of a multiprocessor, by rows
ARGUMENTS = {
    "norm": {"squares_ptr": "*fp32"},
    "bias": {"bias_ptr": "*bf16"},
    "split": {"parts_ptr": "*fp32", "done_ptr": "*i32"},
    "sum": {"residual_ptr": "*bf16", "norm_ptr": "*bf16", "weighed_ptr": "*bf16", "next_squares_ptr": "*fp32"},
}


@pytest.mark.timeout(TIMEOUT_S)
def test_numerics_by_the_interpreter() -> None:
    run_interpreted("tests.kernels.triton_linear")


def compiled(name: str, rows: int, *, ahead: bool = True) -> tuple[Made, int]:
    """The kernel as launched, and its splits."""
    outputs, inputs, fused = MATRICES[name]
    gate = next((each for each in ("silu", "gelu_tanh") if each in fused), "")
    split = StreamedLinear(torch.empty(outputs, inputs, device="meta"), None).split_constants
    given = {argument: kind for each in fused & ARGUMENTS.keys() for argument, kind in ARGUMENTS[each].items()}
    given |= ARGUMENTS["split"] if split["SPLITS"] > 1 else {}
    given |= {} if "sum" in fused else {"y_ptr": "*bf16"}
    given |= {"x_ptr": "*bf16", "weight_ptr": "*bf16", **dict.fromkeys(["rows", "x_stride"], "i32")}
    given |= dict.fromkeys(["eps", "scale", "offset"], "fp32")
    tiles = linear_tiles(rows)
    options = launch_options(tiles, ahead=ahead)
    constants = {"INPUTS": inputs, "WIDTH": outputs // (2 if gate else 1), "GATE": gate, **split}
    constants |= {"AHEAD": options.pop("AHEAD"), **tile_constants(tiles, torch.bfloat16)}
    names = linear_kernel.arg_names
    constants |= {each: None for each in names if each not in given and each not in constants}
    signature = {each: given[each] for each in names if each in given}
    made = check_compiled(linear_kernel, signature, constants, aligned=["x_stride"], **options)
    return made, int(split["SPLITS"])


@pytest.mark.parametrize(("name", "rows"), some(CASES, tried=TRIED))
def test_products_compile_for_sm_90_without_spills(name: str, rows: int) -> None:
    made, splits = compiled(name, rows)
    check_streams(made, rows)
    if splits > 1:
        check_last_split_sees_all(made)
    sass = of_cubin(made.asm["cubin"], "-sass")
    loads = re.search(r"LDG\.|LDGSTS", sass)
    read, wait, begin = (sass.index(each) for each in ("CCTL.E.PF2", "ACQBULK", "PREEXIT"))
    assert loads is not None and read < wait < min(begin, loads.start()), "weights alone are read before the wait"


def test_products_compile_for_older_gpus() -> None:
    made, _ = compiled("Qwen3-8B, out", 16, ahead=False)
    check_streams(made, 16)
    assert "griddepcontrol" not in made.asm["ptx"]


def check_streams(made: Made, rows: int) -> None:
    """Copies of 16 bytes made ahead, tensor cores, and as many programs a multiprocessor as its memory needs."""
    tiles = linear_tiles(rows)
    sass = of_cubin(made.asm["cubin"], "-sass")
    sizes = [2 * tiles.outputs * tiles.inputs, 2 * tiles.rows * tiles.inputs]
    of_stage = sum(size // 16 // (32 * tiles.warps) for size in sizes)
    copies = re.findall(r"LDGSTS\S*", sass)
    assert set(copies) == {"LDGSTS.E.BYPASS.128"}, "narrow copies"
    assert len(copies) >= tiles.stages * of_stage and len(copies) % of_stage == 0, "copies that are not made ahead"
    assert f"HGMMA.64x{tiles.rows}x16" in sass, "tensor cores are idle"
    at_once = AT_ONCE[rows]
    assert at_once * made.usage["REG"] * 32 * tiles.warps <= MULTIPROCESSOR["registers"], made.usage
    assert at_once * (made.metadata.shared + 1024) <= MULTIPROCESSOR["shared"], made.metadata.shared


def test_bits_do_not_depend_on_the_batch() -> None:
    """All tiles read the same inputs in one product of tensor cores after another; splits are whole ones of all tiles."""
    tiles = [linear_tiles(rows) for rows in range(1, MAX_ROWS + 1)]
    assert {replace(one, rows=0, outputs=0, warps=0, stages=0) for one in tiles} == {
        replace(tiles[0], rows=0, outputs=0, warps=0, stages=0)
    }
    assert all(one.rows >= rows for rows, one in enumerate(tiles, 1))


@pytest.mark.parametrize(
    ("outputs", "inputs", "ours"),
    [
        (6144, 4096, True),
        (24576, 4096, True),
        (4096, 12288, True),
        (151936, 4096, False),  # a head
        (57344, 8192, False),  # gate and up of 70B
        (4096, 4095, False),  # rows of weights that 16 bytes do not divide
    ],
)
def test_who_multiplies_follows_from_shapes(outputs: int, inputs: int, ours: bool) -> None:
    assert [streams(outputs, inputs, rows) for rows in (1, MAX_ROWS, MAX_ROWS + 1)] == [ours, ours, False]
