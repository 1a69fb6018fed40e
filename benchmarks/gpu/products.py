"""A layer's products by our kernel and by cuBLAS, each with the sum, norm or gate around it; ours also by other tiles."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.target import QWEN3_8B, TABLE, TINY, Shape, Target
from engine.executor.graphs import CudaCapture
from engine.kernels.triton import linear
from engine.kernels.triton.elementwise import TritonElementwise
from engine.kernels.triton.linear import GROUP, StreamedLinear, Weighed

BATCHES = (1, 2, 4, 8, 16, 32, 64)
TRIED = (1, 64)  # batches of other tiles
EPS = 1e-6
ADDED, GATED = ("out", "down"), ("gate_up",)

Change = Mapping[str, int]  # of LinearTiles, and `splits`


def weights_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's four matrices."""
    wide = shape.head_dim * shape.heads
    return {
        "qkv": (wide + 2 * shape.head_dim * shape.kv_heads, shape.hidden),
        "out": (shape.hidden, wide),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }


def product_rows(target: Target) -> list[dict[str, Any]]:
    """A row for each matrix and batch. `error`: beside cuBLAS, of the largest output; `same_bits`: of a row alone."""
    shape, batches = target.pick((QWEN3_8B, BATCHES), (TINY, (1, 2)))
    rows = []
    for name, (outs, ins) in (weights_of(shape) | {"head": (shape.vocab, shape.hidden)}).items():
        weight = _random(target, outs, ins) / ins**0.5
        for batch in batches:
            row = {"matrix": name, "batch": batch, "ours": linear.streams(outs, ins, batch)}
            x = _random(target, batch, ins)
            for way, work in {
                "cublas": _by_cublas(target, name, x, weight),
                "own": own(target, name, x, weight),
            }.items():
                row[f"{way}_ms"] = ms = _ms(target, work)
                row[f"{way}_of_copy"] = target.share(weight.nbytes / ms / 1e6, "copy_gb_s")
            rows.append(row | _beside(x, weight) | _best(target, name, x, weight, row["own_ms"]))
    return rows


def changes(target: Target) -> list[Change]:
    found: list[Change] = target.pick(TABLE["tiles"]["products"], [])
    return found


def _beside(x: Tensor, weight: Tensor) -> dict[str, Any]:
    matrix = StreamedLinear(weight, None)
    found, right = matrix.times(x), functional.linear(x, weight)
    error = float((found.float() - right.float()).abs().max() / right.float().abs().max())
    return {"error": error, "same_bits": torch.equal(matrix.times(x[-1:]), found[-1:])}


def _best(target: Target, name: str, x: Tensor, weight: Tensor, own_ms: float) -> dict[str, Any]:
    tried: list[dict[str, Any]] = [{"tiles": {}, "ms": own_ms}]
    for change in changes(target) if len(x) in TRIED else []:
        try:
            with changed(change):
                tried.append({"tiles": change, "ms": _ms(target, own(target, name, x, weight))})
        except Exception as error:  # tiles that do not fit this GPU
            tried.append({"tiles": change, "ms": float("inf"), "error": f"{type(error).__name__}: {error}"[:200]})
    return {"best": min(tried, key=lambda one: one["ms"]), "tried": tried}


@contextmanager
def changed(change: Change) -> Iterator[None]:
    """Matrices that are made and multiplied within take tiles and splits that differ so."""
    tiles = {name: size for name, size in change.items() if name != "splits"}
    used, splits_of = linear.linear_tiles, linear.splits_of
    with (
        mock.patch.object(linear, "linear_tiles", lambda rows: replace(used(rows), **tiles)),
        mock.patch.object(linear, "splits_of", lambda *of: change.get("splits") or splits_of(*of)),
    ):
        yield


def own(target: Target, name: str, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    matrix = StreamedLinear(weight, None)
    if name in ADDED:
        residual, norm = _random(target, len(x), len(weight)), _random(target, len(weight))
        return lambda: matrix.add_to(residual, x, norm=norm, eps=EPS, offset=0.0).rows
    groups = torch.ones(-(-x.shape[1] // GROUP), len(x), device=x.device)
    return lambda: matrix.times(Weighed(x, groups, EPS), gate="silu" if name in GATED else "")


def _by_cublas(target: Target, name: str, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    kernels = TritonElementwise()
    if name in ADDED:
        residual, norm = _random(target, len(x), len(weight)), _random(target, len(weight))
        return lambda: kernels.rms_norm(residual, norm, eps=EPS, delta=functional.linear(x, weight))
    if name in GATED:
        return lambda: kernels.silu_mul(functional.linear(x, weight))
    return lambda: functional.linear(x, weight)


def _ms(target: Target, work: Callable[[], Tensor]) -> float:
    """As a graph: a host launches more slowly than these run."""
    return target.ms(work if target.small else CudaCapture(torch.cuda.Stream(target.device)).capture(work))


def _random(target: Target, *size: int) -> Tensor:
    return torch.randn(size, device=target.device).to(getattr(torch, target.dtype))
