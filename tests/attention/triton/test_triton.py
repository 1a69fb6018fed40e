"""Triton kernels without a GPU: numerics by the interpreter, and what the compiler makes of them for an H100/H200."""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import gcd
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton.decode import (
    cache_constants,
    decode_split_kernel,
    decode_tiles,
    head_tiles,
    latent_decode_tiles,
    list_constants,
    split_constants,
    split_list_kernel,
    split_options,
)
from engine.kernels.triton.elementwise import (
    GATE_TILE,
    gate_kernel,
    norm_sum_norm_kernel,
    rms_norm_kernel,
    whole_norm_kernel,
)
from engine.kernels.triton.experts import (
    MID_ROWS,
    SHORT_ROWS,
    SORT_TILE,
    SORT_WARPS,
    SPARSE_ROWS,
    SUM_TILE,
    ExpertTiles,
    down_kernel,
    expert_tiles,
    product_constants,
    route_constants,
    route_kernel,
    sort_kernel,
    sum_kernel,
    up_kernel,
)
from engine.kernels.triton.extend import (
    extend_constants,
    extend_kernel,
    extend_merge_constants,
    extend_merge_kernel,
    extend_tiles,
    latent_extend_tiles,
    merge_warps,
)
from engine.kernels.triton.latent_write import latent_write_kernel
from engine.kernels.triton.packed import PackedForm, Stack
from engine.kernels.triton.recurrent import (
    conv_constants,
    conv_kernel,
    delta_constants,
    delta_kernel,
    gated_norm_kernel,
    mamba_constants,
    mamba_kernel,
    norm_constants,
    norm_warps,
)
from engine.kernels.triton.rope_write import HEAD_TILE, rope_write_kernel
from engine.model_files.experts_config import ExpertsConfig
from tests.attention.triton.interpreted import TIMEOUT_S, run_interpreted
from tests.cells import some

ROOT = Path(__file__).parents[3]
SM_90 = GPUTarget("cuda", 90, 32)
SHARED_LIMIT_BYTES = 227 << 10  # of a multiprocessor
REGISTERS = 65536
# Needs more registers: decode of units and of dim 256 spills up to 64 bytes, extend of codes 16.
IS_OLD = triton.__version__.startswith("3.6.")
SPILLS = {(128, 128): 16}  # bytes of a thread, by rows and block of extend: no measurable part of its loop
STRIDES = ["page_grains", "page_stride", "unit_stride", "q_stride"]  # multiples of 16
WHERE_NEEDED = ["sinks_ptr", "path_starts_ptr", "path_places_ptr", "path_stride"]
WHERE_NEEDED += ["logit_bias_ptr", "choice_bias_ptr", "bias_ptr", "factors_ptr", "order_ptr", "blocks_ptr"]
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "codes": torch.bfloat16}  # of q
KEPT, OF_Q = {"codes": "u8"}, {"codes": "bf16"}
SHAPES = {
    "Qwen3-0.6B": {"heads": 16, "kv_heads": 8, "dim": 128},
    "Llama-3.2-1B": {"heads": 32, "kv_heads": 8, "dim": 64},
    "Gemma-like": {"heads": 16, "kv_heads": 2, "dim": 256},
    "Qwen2.5-7B": {"heads": 28, "kv_heads": 4, "dim": 128},
    "in units": {"heads": 16, "kv_heads": 8, "dim": 128, "units": 4},
}


# Beside plain attention. Shapes of the layers that have them.
SOFTMAXES = {
    "Gemma 2": {"heads": 16, "kv_heads": 8, "dim": 256, "window": 4096, "cap": 50.0},
    "Gemma 3": {"heads": 32, "kv_heads": 16, "dim": 128, "window": 1024},
    "Mistral": {"heads": 32, "kv_heads": 8, "dim": 128, "window": 4096},
    "gpt-oss": {"heads": 64, "kv_heads": 8, "dim": 64, "window": 128, "sinks": True},
    "gpt-oss, all tokens": {"heads": 64, "kv_heads": 8, "dim": 64, "sinks": True},
    "gpt-oss, of four ranks": {"heads": 16, "kv_heads": 2, "dim": 64, "sinks": True},
}
TREES = {f"{name}, trees": {**SHAPES[name], "paths": True} for name in ("Qwen3-0.6B", "in units")}
# Of DeepSeek and GLM-4.7.
LATENTS = {f"{heads} heads of latents": {"heads": heads, "dim": 512, "rest": 64} for heads in (16, 20, 128)}
LAYERS: dict[str, dict[str, Any]] = {**SHAPES, **SOFTMAXES, **TREES, **LATENTS}

# What is served is in bf16, of which `make test` compiles the widest of each and what takes a way of its own; the interpreter
# below runs fp32. `make slow-tests` compiles the others.
DECODED = {
    *(("bf16", layer) for layer in ("Gemma-like", "in units", "gpt-oss", "128 heads of latents", "in units, trees")),
    *(("codes", layer) for layer in ("Qwen3-0.6B, trees", "Gemma-like", "20 heads of latents")),
}
EXTENDED = {
    *((False, "codes", layer) for layer in ("Qwen3-0.6B", "Gemma-like", "20 heads of latents")),
    (True, "codes", "Qwen2.5-7B"),
    *((split, "bf16", "Gemma-like") for split in (False, True)),
    *((False, "bf16", "Gemma 2"), (True, "bf16", "gpt-oss"), (True, "bf16", "128 heads of latents")),
}


@pytest.mark.timeout(TIMEOUT_S)
def test_numerics_by_the_interpreter():
    cases = ("numerics", "windows", "latents", "experts", "recurrent", "divisions")
    run_interpreted(*(f"tests.attention.triton.triton_{of}" for of in cases))


@pytest.mark.timeout(TIMEOUT_S)
def test_codes_by_the_interpreter():
    run_interpreted("tests.attention.triton.triton_fp8")


@pytest.mark.parametrize(
    ("dtype", "layer"),
    some(product(TORCH_DTYPES, LAYERS), tried=DECODED),
)
def test_decode_compiles_for_sm_90_without_spills(layer, dtype):
    made = compiled_decode(dtype, **LAYERS[layer])
    if layer in SHAPES:
        check_last_split_sees_all(made)


def compiled_decode(
    dtype: str, *, window: int = 0, cap: float = 0.0, sinks: bool = False, paths: bool = False, **layer: int
) -> "Made":
    signature = {
        **pointers(dtype),
        "out_ptr": f"*{OF_Q.get(dtype, dtype)}",
        **dict.fromkeys(["part_ptr", "sums_ptr"], "*fp32"),
        **dict.fromkeys(["list_ptr", "done_ptr", "merges_ptr", "table_ptr"], "*i32"),
        **sinks_argument(sinks),
        **(dict.fromkeys(["path_starts_ptr", "path_places_ptr"], "*i32") if paths else {}),
        **dict.fromkeys(["batch", "q_stride", "table_stride", *(["path_stride"] if paths else [])], "i32"),
        **{"page_grains": "i32", "unit_grains": "i32", "scale": "fp32"},
    }
    if "rest" in layer:
        layer["kv_heads"] = head_tiles(layer["heads"])
        tiles = latent_decode_tiles(tiles_of_heads=layer["kv_heads"], dtype=TORCH_DTYPES[dtype], codes=dtype in KEPT)
    else:
        heads_and_dim = {"kv_heads": layer["kv_heads"], "dim": layer["dim"]}
        tiles = decode_tiles(**heads_and_dim, dtype=TORCH_DTYPES[dtype], codes=dtype in KEPT)
    cache = cache_constants(**layer, page_size=16, dtype=TORCH_DTYPES[dtype], exponents=exponents_of(dtype, layer))
    constants = split_constants(cache, tiles, window=window, cap=cap)
    options = split_options(tiles)
    options = {**options, "spill_bytes": 64 if IS_OLD else 0}
    made = check_compiled(decode_split_kernel, signature, constants, aligned=STRIDES, **options)
    assert made.metadata.shared * tiles.per_sm <= SHARED_LIMIT_BYTES
    assert made.usage["REG"] * 32 * tiles.warps * tiles.per_sm <= REGISTERS
    check_codes(made, dtype, layer)
    return made


def pointers(dtype: str) -> dict[str, str]:
    kept = KEPT.get(dtype, dtype)
    return {"q_ptr": f"*{OF_Q.get(dtype, dtype)}", "k_ptr": f"*{kept}", "v_ptr": f"*{kept}"}


def exponents_of(dtype: str, layer: dict[str, int]) -> int:
    """Of a token in a unit, or what a latent's row has behind its codes."""
    return 0 if dtype not in KEPT else 16 if "rest" in layer else layer["kv_heads"] // layer.get("units", 1)


def check_codes(made: "Made", dtype: str, layer: dict[str, int]) -> None:
    """Codes arrive by the widest copies that their rows allow, and widen by the instructions for two at once."""
    if dtype in KEPT:
        ptx = made.asm["ptx"]
        copies = {int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global [^,]*, [^,]*, (0x\w+)", ptx)}
        wide = 16 if "rest" in layer else gcd(exponents_of(dtype, layer), 8)
        assert wide < 4 or max(copies) >= wide, copies
        assert "cvt.rn.f16x2.e4m3x2" in ptx and "cvt.rn.bf16x2.f32" in ptx and "cvt.bf16.f16" not in ptx


def sinks_argument(there: bool) -> dict[str, str]:
    return {"sinks_ptr": "*fp32"} if there else {}


def check_last_split_sees_all(made: "Made") -> None:
    """All threads store their parts before one thread counts the split; what is read then comes from no cache of before."""
    ptx = re.findall(r"^\s+(?:@%p\d+ )?(st\.global|ld\.global|bar\.sync|atom\S*|red\.\S*)", made.asm["ptx"], re.M)
    (count,) = (i for i, each in enumerate(ptx) if each.startswith(("atom", "red")))
    before, after = runs(ptx[:count]), runs(ptx[count + 1 :])
    assert ptx[count] == "atom.global.gpu.acq_rel.add.u32"
    assert before[-2:] == ["st.global", "bar.sync"] and after[:3] == ["bar.sync", "st.global", "bar.sync"]
    kinds = r"STG|LDG(?!STS|DEPBAR)\S*|BAR\.SYNC|MEMBAR\S*|ATOMG\S*|CCTL\S*"
    code = of_cubin(made.asm["cubin"], "-sass")
    sass = re.findall(rf"\s(@!?U?P\d )?\s*({kinds})", code)
    (count,) = (i for i, (_, each) in enumerate(sass) if each.startswith("ATOMG"))
    counted, names = sass[count - 1 : count + 2], [each for _, each in sass]
    before, after = runs(names[: count - 1]), runs(names[count + 2 :])
    assert [each for _, each in counted] == ["MEMBAR.ALL.GPU", "ATOMG.E.ADD.STRONG.GPU", "CCTL.IVALL"], counted
    to_one = re.search(r"@!?P\d+ BRA", code[code[: code.index("ATOMG")].rindex("BAR.SYNC") : code.index("ATOMG")])
    assert to_one or all(predicate for predicate, _ in counted), "more than one thread counts"
    assert before[-2:] == ["STG", "BAR.SYNC"] and after[:3] == ["BAR.SYNC", "STG", "BAR.SYNC"], after[:3]
    assert after[3].startswith("LDG.E"), after[3]
    assert not any("CONSTANT" in each for each in names[count:]), "a load whose cache keeps what it has"


def runs(names: list[str]) -> list[str]:
    """Without repetitions of neighbours."""
    return [name for name, _ in groupby(names)]


def test_the_list_of_splits_compiles_for_sm_90_without_spills():
    tiles = decode_tiles(kv_heads=8, dim=128, dtype=torch.bfloat16)
    lists = dict.fromkeys(["list_ptr", "done_ptr"], "*i32")
    signature = {"kv_lens_ptr": "*i32", "slots_ptr": "*i64", **lists, "batch": "i32"}
    constants = list_constants(kv_heads=8, tiles=tiles, per_head=66)
    check_compiled(split_list_kernel, signature, constants, aligned=[], num_warps=1, num_stages=2)


def test_elementwise_kernels_compile_for_sm_90_without_spills():
    """Of Qwen3-8B."""
    pointers = dict.fromkeys(["x_ptr", "delta_ptr", "weight_ptr", "out_ptr"], "*bf16")
    signature = {**pointers, "width": "i32", "x_stride": "i32", "eps": "fp32"}
    constants, aligned = {"OFFSET": 1.0, "TILE": 4096}, ["width", "x_stride"]
    check_compiled(rms_norm_kernel, signature, constants, aligned=aligned, num_warps=8, num_stages=3)
    pointers = dict.fromkeys(["x_ptr", "delta_ptr", "weight_ptr", "inner_ptr", "out_ptr"], "*bf16")
    signature = {**pointers, "width": "i32", **dict.fromkeys(["eps", "inner_eps", "offset", "inner_offset"], "fp32")}
    check_compiled(norm_sum_norm_kernel, signature, {"TILE": 4096}, aligned=["width"], num_warps=8, num_stages=3)
    aligned = ["q_width", "k_width", "x_stride"]
    signature = {**dict.fromkeys(["x_ptr", "q_ptr", "k_ptr"], "*bf16"), **dict.fromkeys(aligned, "i32"), "eps": "fp32"}
    check_compiled(
        whole_norm_kernel, signature, {"TILE": 4096}, aligned=aligned, streams=False, num_warps=8, num_stages=3
    )
    signature = {**dict.fromkeys(["x_ptr", "out_ptr"], "*bf16"), "width": "i32"}
    for gelu in (False, True):
        constants = {"GELU": gelu, "TILE": GATE_TILE}
        check_compiled(gate_kernel, signature, constants, aligned=["width"], num_warps=4, num_stages=3)


@pytest.mark.parametrize(("norms", "kept"), [(False, "bf16"), (True, "bf16"), (True, "u8")])
def test_the_turn_compiles_for_sm_90_without_spills(norms, kept):
    """Of Qwen3-8B, or of Llama 3: no norm."""
    names = ["x_ptr", "weight_ptr", "cosine_ptr", "sine_ptr", "k_cache_ptr", "v_cache_ptr"]
    strides = {"x_stride": "i32", "turn_stride": "i32", "page_stride": "i64", "unit_stride": "i32"}
    places = dict.fromkeys(["pages_ptr", "offsets_ptr"], "*i64")
    signature = {**dict.fromkeys(names[:4], "*bf16"), **dict.fromkeys(names[4:], f"*{kept}"), **places, **strides}
    signature |= {"eps": "fp32", "offset": "fp32"}
    constants = {"HEADS": 32, "KV_HEADS": 8, "UNIT_HEADS": 8, "DIM": 128}
    constants |= {"NORMS": norms, "TILE": 64, "TILE_HEADS": HEAD_TILE}
    made = check_compiled(rope_write_kernel, signature, constants, aligned=list(strides), num_warps=4, num_stages=3)
    stores = re.findall(r"st\.global\S*", made.asm["ptx"])
    if kept == "u8":
        assert "cvt.rn.satfinite.e4m3x2.f32" in made.asm["ptx"] and len(stores) == 8, stores
    else:
        assert len(stores) == 6 and all(".v4" in store or ".v2" in store for store in stores), stores


@pytest.mark.parametrize("kept", ["bf16", "u8"])
def test_the_turn_of_latents_compiles_for_sm_90_without_spills(kept):
    """Of DeepSeek-V3."""
    strides = [name for name in latent_write_kernel.arg_names if name.endswith("_stride")]
    pointers = [name for name in latent_write_kernel.arg_names if name.endswith("_ptr")]
    signature = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(["pages_ptr", "offsets_ptr"], "*i64")
    signature |= dict.fromkeys(strides, "i32") | {"eps": "fp32", "cache_ptr": f"*{kept}"}
    constants = {"HEADS": 128, "HEAD_STRIDE": 192, "RANK": 512, "REST": 64}
    constants |= {"TILE_RANK": 512, "TILE": 32, "TILE_HEADS": HEAD_TILE}
    options = {"aligned": strides, "num_warps": 4, "num_stages": 3}
    made = check_compiled(latent_write_kernel, signature, constants, **options)
    stores = re.findall(r"st\.global\S*", made.asm["ptx"])
    key = [".b8" in store or ".b16" in store for store in stores].count(True)
    assert (len(stores), key) == ((6, 3) if kept == "u8" else (5, 2)), f"by single elements the key alone: {stores}"


RECURRENCES = {  # Of Qwen3-Next; Falcon-H1 34B and 1.5B; Granite 4 Small.
    "delta": (delta_kernel, delta_constants(16, 32, 128, 128), 4),
    "mamba 32 x 256 x 128": (mamba_kernel, mamba_constants(32, 2, 256, 128) | {"GATES": True}, 4),
    "mamba 48 x 256 x 64": (mamba_kernel, mamba_constants(48, 1, 256, 64) | {"GATES": False}, 4),
    "mamba 128 x 128 x 64": (mamba_kernel, mamba_constants(128, 1, 128, 64) | {"GATES": False}, 4),
    "norm": (gated_norm_kernel, norm_constants(8192, 8192) | {"GATE_FIRST": True}, norm_warps(8192)),
    "convolution": (conv_kernel, conv_constants(8192, 4) | {"BIASED": True}, 4),
}


@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrences_compile_for_sm_90_without_spills(name):
    """The state of a head, or a tile of it, is in registers, two programs or more on a multiprocessor."""
    kernel, constants, warps = RECURRENCES[name]
    strides = [n for n in kernel.arg_names if n.endswith("_stride")]
    floats = dict.fromkeys(["decay_ptr", "bias_ptr", "skip_ptr", "norm_ptr", "weight_ptr"], "*fp32")
    floats |= {} if kernel is conv_kernel else {"state_ptr": "*fp32"}
    floats |= dict.fromkeys(["scale", "eps", "shortest", "longest"], "fp32")
    floats |= {"x_ptr": "*fp32"} if kernel is gated_norm_kernel else {}
    whole = dict.fromkeys(strides, "i32") | floats | {"units_ptr": "*i32"}
    signature = {n: whole.get(n, "*bf16") for n in kernel.arg_names if n not in constants}
    aligned = [n for n in strides if n not in ("gates_stride", "time_stride")]
    made = check_compiled(kernel, signature, constants, aligned=aligned, num_warps=warps, num_stages=3)
    assert made.usage["REG"] * 32 * warps * 2 <= REGISTERS, made.usage


@pytest.mark.parametrize(
    ("split", "dtype", "layer"),
    some(product([False, True], TORCH_DTYPES, [*list(SHAPES)[:4], *SOFTMAXES, *LATENTS]), tried=EXTENDED),
)
def test_extend_compiles_for_sm_90_without_spills(layer, dtype, split):
    compiled_extend(dtype, split=split, **LAYERS[layer])


def compiled_extend(
    dtype: str, *, split: bool, window: int = 0, cap: float = 0.0, sinks: bool = False, **layer: int
) -> None:
    signature = {
        **pointers(dtype),
        **dict.fromkeys(["out_ptr", "lse_ptr"], "*fp32" if split else f"*{OF_Q.get(dtype, dtype)}"),
        **{"units_ptr": "*i32", "table_ptr": "*i32", "slots_ptr": "*i64"},
        **dict.fromkeys(["starts_ptr", "kv_lens_ptr"], "*i32"),
        **sinks_argument(sinks),
        **{"q_stride": "i32", "table_stride": "i32", "page_grains": "i32"},
        **{"unit_grains": "i32", "scale": "fp32"},
    }
    if "rest" in layer:
        layer["kv_heads"], tiles = 1, latent_extend_tiles(dtype=TORCH_DTYPES[dtype])
    else:
        tiles = extend_tiles(dim=layer["dim"], dtype=TORCH_DTYPES[dtype], exponents=exponents_of(dtype, layer))
    cache = cache_constants(**layer, page_size=16, dtype=TORCH_DTYPES[dtype], exponents=exponents_of(dtype, layer))
    constants = extend_constants(cache, tiles, split=split, window=window, cap=cap)
    options = {
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "spill_bytes": SPILLS.get((tiles.rows, tiles.block), 0),
    }
    made = check_compiled(extend_kernel, signature, constants, aligned=STRIDES, **options)
    check_codes(made, dtype, layer)
    if dtype != "fp32":
        assert "wgmma" in made.asm["ptx"], "Hopper's own products are idle"
        assert made.usage["REG"] <= REGISTERS // (32 * tiles.warps), made.usage


@pytest.mark.parametrize(
    "heads", [{"heads": 32, "kv_heads": 8, "dim": 128}, {"heads": 16, "kv_heads": 1, "dim": 512}], ids=str
)
def test_the_merge_of_extend_compiles_for_sm_90_without_spills(heads):
    """Of Qwen3-8B, and of latents."""
    tiles, warps = extend_tiles(dim=128, dtype=torch.bfloat16), merge_warps(heads["dim"])
    signature = {
        **dict.fromkeys(["part_ptr", "lse_ptr"], "*fp32"),
        **{"out_ptr": "*bf16", "merges_ptr": "*i32", "starts_ptr": "*i32"},
    }
    constants = extend_merge_constants(**heads, tiles=tiles)
    made = check_compiled(extend_merge_kernel, signature, constants, aligned=[], num_warps=warps, num_stages=3)
    assert made.usage["REG"] * 32 * warps <= REGISTERS // (4 if warps == 4 else 1), made.usage


MIXTURES = {
    "Qwen3-30B-A3B": {"count": 128, "hidden": 2048, "width": 768, "per_token": 8},
    "gpt-oss-20b": {"count": 32, "hidden": 2880, "width": 2880, "per_token": 4, "clamped": True},
    "GLM-4.5": {"count": 160, "hidden": 5120, "width": 1536, "per_token": 8},
}
# Pairs an expert; 0: pairs are blocks.
STEPS = {"few": 0, "sparse": SPARSE_ROWS, "short": SHORT_ROWS, "mid": MID_ROWS, "long": MID_ROWS + 1}
PRODUCTS = {("bf16", step, "Qwen3-30B-A3B") for step in ("few", "short", "long")} | {("bf16", "mid", "gpt-oss-20b")}


@pytest.mark.parametrize(("dtype", "step", "model"), some(product(["bf16", "fp32"], STEPS, MIXTURES), tried=PRODUCTS))
def test_products_of_experts_compile_for_sm_90_without_spills(dtype, step, model):
    for made, tiles in compiled_products(dtype, step, MIXTURES[model]):
        if dtype == "bf16":
            copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^,]*, [^,]*, (0x\w+)", made.asm["ptx"])
            assert copies and set(copies) == {"0x10"}, "loads are not pipelined, or narrow"
            # mma.sync for all short steps: a row has its bits in each of them
            kinds = set(re.findall(r"wgmma\.mma_async\S*k16|mma\.sync\S*m16n8k16", made.asm["ptx"]))
            assert len(kinds) == 1 and ("wgmma" in kinds.pop()) == (tiles.rows > 16)


def compiled_products(
    dtype: str, step: str, mixture: dict[str, Any], *, form: PackedForm | None = None
) -> Iterator[tuple["Made", ExpertTiles]]:
    """Up and down, by weights of `form` or dense ones."""
    count, hidden, width, clamped = mixture["count"], mixture["hidden"], mixture["width"], "clamped" in mixture
    tiles = expert_tiles(STEPS[step] * count, count, TORCH_DTYPES[dtype], packed=form is not None)
    lists = {"chosen_ptr": "*i32", **({} if step == "few" else {"order_ptr": "*i32", "blocks_ptr": "*i32"})}
    more = {"weight_ptr": f"*{dtype}"} if form is None else dict.fromkeys(["weight_ptr", "factors_ptr"], "*i32")
    more |= lists | ({"bias_ptr": "*fp32"} if clamped else {})
    up = dict.fromkeys(["x_ptr", "inner_ptr"], f"*{dtype}") | {"alpha": "fp32", "limit": "fp32"}
    down = {"inner_ptr": f"*{dtype}", "answers_ptr": "*fp32", "pairs": "i32"}
    kernels = (
        (up_kernel, up, hidden, {"PER_TOKEN": mixture["per_token"], "INPUTS": hidden, "CLAMPED": clamped}),
        (down_kernel, down, width, {"SEGMENTS": 1, "OUTPUTS": hidden}),
    )
    for kernel, signature, inputs, constants in kernels:
        factors = None if form is None else torch.empty((1, 1, form.factors(-(-inputs // form.inputs)), 1))
        stack = Stack(torch.empty(0), factors, (count, 0, inputs), form)
        constants |= {**product_constants(stack, tiles, TORCH_DTYPES[dtype]), "COUNT": count, "WIDTH": width}
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        yield check_compiled(kernel, in_order(kernel, signature | more), constants, aligned=[], **options), tiles


def in_order(kernel: Any, signature: dict[str, str]) -> dict[str, str]:
    return {name: signature[name] for name in kernel.arg_names if name in signature}


@pytest.mark.parametrize("groups", [1, 8])
def test_the_choice_of_experts_compiles_for_sm_90_without_spills(groups):
    """Of Qwen3-30B-A3B, and of DeepSeek V3."""
    pointers = {"logits_ptr": "*fp32", "choice_bias_ptr": "*fp32", "chosen_ptr": "*i32", "weights_ptr": "*fp32"}
    signature = {**pointers, "loads_ptr": "*i64", "real_ptr": "*i64", "scale": "fp32"}
    is_v3 = groups > 1
    if not is_v3:
        del signature["choice_bias_ptr"]
    config = ExpertsConfig(count=256 if is_v3 else 128, per_token=8, intermediate=1, sigmoid=is_v3, groups=groups)
    constants = route_constants(replace(config, chosen_groups=4 if is_v3 else 1))
    check_compiled(route_kernel, signature, constants, aligned=[], num_warps=1, num_stages=3)


def test_sorts_and_sums_of_experts_compile_for_sm_90_without_spills():
    """Of Qwen3-30B-A3B."""
    signature = {**dict.fromkeys(["chosen_ptr", "order_ptr", "blocks_ptr"], "*i32"), "pairs": "i32", "blocks": "i32"}
    constants = {"COUNT": 128, "ROWS": 16, "TILE": SORT_TILE}
    check_compiled(sort_kernel, signature, constants, aligned=[], num_warps=SORT_WARPS, num_stages=3)
    signature = {**dict.fromkeys(["answers_ptr", "weights_ptr", "shared_ptr", "gate_ptr"], "*fp32"), "out_ptr": "*bf16"}
    constants = {"PER_TOKEN": 8, "WIDTH": 2048, "TILE": SUM_TILE}
    check_compiled(sum_kernel, signature, constants, aligned=[], num_warps=4, num_stages=3)


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
    streams: bool = True,
    spill_bytes: int = 0,
    **options: int,
) -> Made:
    """Compile as a launch would: pointers, and the scalars named in `aligned`, are multiples of 16.

    `streams`: it multiplies what it loads in a loop. `spill_bytes`: at most, of a thread's stack.
    """
    names = kernel.arg_names
    constants = {**constants, **{n: None for n in WHERE_NEEDED if n in names and n not in signature}}
    assert [n for n in names if n not in constants] == list(signature)
    whole = {n: signature.get(n, "constexpr") for n in names}
    divisible = [n for n in names if whole[n].startswith("*") or n in aligned]
    source = ASTSource(
        fn=kernel,
        signature=whole,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in divisible},
    )
    compiled = triton.compile(source, target=SM_90, options=options)
    assert compiled.metadata.shared <= SHARED_LIMIT_BYTES
    usage = resource_usage(compiled.asm["cubin"])
    assert usage["STACK"] <= spill_bytes and usage["LOCAL"] == 0, usage
    if signature.get("k_ptr") == "*bf16" and streams:
        assert "mma" in compiled.asm["ptx"], "tensor cores are idle"
        assert "cp.async" in compiled.asm["ptx"], "loads are not pipelined"
    return Made(compiled.asm, compiled.metadata, usage)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """What cuobjdump (in the Triton wheel) says of the only function: registers, stack (spills), local memory."""
    printed = of_cubin(cubin, "-res-usage")
    found = re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", printed)
    assert found, printed
    return {name: int(value) for name, value in found}


def of_cubin(cubin: bytes, asked: str) -> str:
    """What cuobjdump prints."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    path = Path(os.environ["TRITON_TEST_DIR"]) / "kernel.cubin"
    path.write_bytes(cubin)
    env = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}  # it calls nvdisasm
    command = [tools / "cuobjdump", asked, path]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    """Triton names what it has compiled by all that it depends on: sources, constants, options, its own and ptxas' version."""
    monkeypatch.setenv("TRITON_TEST_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(ROOT / ".build/triton"))
