"""Compiles all variants of kernels in processes side by side, into one TRITON_CACHE_DIR: later parts, and a later run, find them."""

import os
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu.engine import Run, make_engine
from benchmarks.gpu.families import FAMILIES, family_fields
from benchmarks.gpu.numerics import CASES, SMALL, worst_error
from benchmarks.gpu.products import TRIED, Change, changed, changes, own, weights_of
from benchmarks.gpu.target import QWEN3_8B, QWEN3_30B_A3B, TINY, TINY_MIXTURE, Target, side_by_side
from benchmarks.gpu.tiles import attention_ms, candidates

LENGTHS = (1, 37)  # whole and split, by few tokens
FEW: dict[str, tuple[int, int, int]] = {"decode": (2, 1, 600), "extend": (2, 300, 600)}


def compile_all(target: Target) -> dict[str, Any]:
    """`jobs`: seconds of each, or what it raised."""
    jobs = side_by_side(target, {name: partial(_seconds, job) for name, job in _jobs(target).items()})
    said = [f"{name}: {text}" for name, text in jobs.items() if isinstance(text, str)]
    found = {"cache": os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache"), "jobs": jobs}
    return found | ({"error": "; ".join(said)[:1000]} if said else {})


def _jobs(target: Target) -> dict[str, Callable[[], object]]:
    cases = target.pick(CASES, {"2 x 16": SMALL["2 x 16"]})
    jobs: dict[str, Callable[[], object]] = {
        name: partial(worst_error, target, case, lengths=LENGTHS) for name, case in cases.items()
    }
    shape = target.pick(QWEN3_8B, TINY)
    for kind in ("decode", "extend"):
        for change in candidates(target, kind)[1:]:
            jobs[f"{kind} {change}"] = partial(attention_ms, target, shape, FEW[kind], kind, change)
    for name, (outs, ins) in weights_of(shape).items():
        for each in ({}, *changes(target)):
            jobs[f"product {name} {each}"] = partial(_products, target, name, (outs, ins), each)
    for family in target.pick(FAMILIES, ("qwen3",)):
        jobs[family] = partial(_steps, target, family_fields(target, family))
    return jobs | {"mixture": partial(_steps, target, target.pick(QWEN3_30B_A3B, TINY_MIXTURE).fields(context=1024))}


def _seconds(job: Callable[[], object]) -> float:
    begin = perf_counter()
    job()
    return round(perf_counter() - begin, 1)


def _products(target: Target, name: str, size: tuple[int, int], change: Change) -> None:
    """One matrix, by the rows of all tiles, or of those that differ so."""
    weight = torch.zeros(size, dtype=getattr(torch, target.dtype), device=target.device)
    for rows in target.pick(TRIED if change else (*TRIED, 32), (2,)):
        with changed(change):
            own(target, name, weight[:rows], weight)()


def _steps(target: Target, fields: dict[str, Any]) -> None:
    """A prompt and a decode step, through a scheduler: families know how their layers keep what they keep."""
    flags = {"max_running_requests": 2, "max_total_tokens": 1024, "attention_backend": target.pick("triton", "auto")}
    parts = make_engine(target, {**fields, "num_hidden_layers": 2}, **flags)
    run = Run(parts, depth=1)
    for i in range(2):
        run.add(str(i), prompt=[16 + t % 250 for t in range(target.pick(300, 20) + i)], new_tokens=3)
    run.drain()
    parts.device.executor.close()
