"""Two ranks: sums that have the bits of the tree, eager and recorded, how long they take, and a worker's tokens beside the CPU's.

With two GPUs each rank has one, over NCCL and symmetric memory. NCCL refuses one GPU to two ranks, so there gloo carries the bytes:
that proves the arithmetic and the order. Times count over NCCL alone, where no other part runs (`--parts ranks`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.device.gpus import VISIBLE, installed_gpus, visible_gpus

if TYPE_CHECKING:
    from benchmarks.gpu.target import Target  # a rank that adds needs no engine

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
WIDTH = 4096
ROWS = (1, 16, 64, 1024)  # of sums of WIDTH numbers: 16 KiB to 16 MiB
FEW_ROWS = (1, 65)  # on a CPU, small and large
JOIN_S = 30.0
REPEATS = 50
PROMPTS = ([20 + n % 250 for n in range(0, 7 * length, 7)] for length in (5, 40, 200))
NEW_TOKENS = 16


def measure(target: "Target") -> dict[str, Any]:
    """Raises RuntimeError where a rank fails, AssertionError for other bits or tokens."""
    gpus = [] if target.small else visible_gpus(os.environ.get(VISIBLE), installed_gpus)
    found = {"gpus": len(gpus), **_sums(target, gpus)}
    if len(gpus) == 1:
        return {**found, "nccl": "not run: one GPU", "tokens": "not run: one GPU"}
    prompts = [prompt[: target.pick(200, 8)] for prompt in PROMPTS]
    expected = _tokens(target, prompts, {"device": "cpu"})
    shapes = target.pick(
        {"--tp-size 2": {"tp_size": 2}, "--pp-size 2": {"pp_size": 2}}, {"--tp-size 2": {"tp_size": 2}}
    )
    same = {
        name: _tokens(target, prompts, {**sizes, "device": target.device.type}, gpus) == expected
        for name, sizes in shapes.items()
    }
    assert all(same.values()), f"other tokens than on the CPU: {same}"
    return {**found, "tokens": same}


# ---- sums, in two processes


def _sums(target: "Target", gpus: list[str]) -> dict[str, Any]:
    from engine.parallel.region_plan import new_store

    store = new_store()
    backend = "nccl" if len(gpus) >= RANKS else "gloo"
    try:
        ranks = [
            _child(
                ["--rank", str(rank), "--store", str(store), "--backend", backend], target, gpus[rank : rank + 1], store
            )
            for rank in range(RANKS)
        ]
        found, *_ = [_result(rank) for rank in ranks]
        return {"backend": backend, **found}
    finally:
        os.close(store)


def _child(argv: list[str], target: "Target", gpus: list[str], *descriptors: int) -> "subprocess.Popen[str]":
    """`gpus`: that it sees; []: what this process sees."""
    env = {**os.environ, **({VISIBLE: gpus[0]} if gpus else {})}
    return subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "--device", str(target.device), *argv],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=descriptors,
    )


def _result(child: "subprocess.Popen[str]") -> dict[str, Any]:
    out, said = child.communicate()
    if child.returncode != 0:
        raise RuntimeError(f"a rank ended with {child.returncode}: {said[-1000:]}")
    return dict(json.loads(out.splitlines()[-1]))


def _rank(rank: int, store: int, *, backend: str, device: torch.device) -> dict[str, Any]:
    """What one of the two finds."""
    from engine.executor.graphs import CudaCapture
    from engine.parallel.collectives import tree_sum
    from engine.parallel.layout import Place
    from engine.parallel.process_groups import NcclCollectives, joined

    place = Place(tp_rank=rank, tp_size=RANKS)
    groups = joined(store, place, device, timeout_s=JOIN_S, backend=backend)
    assert groups.stage is not None
    c = NcclCollectives(groups.stage, memory=groups.memory)
    us = {}
    for rows in ROWS if device.type == "cuda" else FEW_ROWS:
        draws = [torch.Generator().manual_seed(r) for r in range(RANKS)]
        parts = [torch.randn((rows, WIDTH), generator=draw).to(device) for draw in draws]
        wanted = tree_sum(parts).to(torch.bfloat16)

        def work(own: Tensor = parts[rank]) -> Tensor:
            return c.sum(own, dtype=torch.bfloat16)

        assert torch.equal(work(), wanted), f"other bits than the tree's in a sum of {rows} rows"
        if backend == "nccl":
            work = CudaCapture(torch.cuda.Stream(device)).capture(work)
            assert torch.equal(work(), wanted), f"other bits in a recorded sum of {rows} rows"
        us[f"{rows * WIDTH * 4 >> 10} KiB"] = _p50_us(work, device)
    row = torch.arange(4, device=device) * (rank + 1)
    c.share(row)
    assert row.tolist() == [0, 1, 2, 3], "the leader's row did not arrive"
    return {
        "same_bits": True,
        "recorded": backend == "nccl",
        "symmetric_memory": groups.memory is not None,
        "p50_us": us,
    }


def _p50_us(work: Any, device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        begin = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(perf_counter() - begin)
    return round(1e6 * statistics.median(times), 1)


# ---- a worker's tokens


def _tokens(
    target: "Target", prompts: list[list[int]], flags: Mapping[str, Any], gpus: Sequence[str] = ()
) -> dict[str, list[int]]:
    """On GPUs in a process of its own: the leader sees one alone."""
    if target.small:
        return _lead(prompts, flags, [])
    spec = json.dumps({"prompts": prompts, "flags": flags, "gpus": gpus[:RANKS]})
    leader = RANKS - 1 if "pp_size" in flags else 0
    env = {**os.environ, **({VISIBLE: gpus[leader]} if gpus else {})}
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--lead", spec],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{flags}: {done.stderr[-1000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _lead(prompts: list[list[int]], flags: Mapping[str, Any], gpus: list[str]) -> dict[str, list[int]]:
    from benchmarks.gpu.engine import Run
    from disagg.config import DisaggConfig, SchedulerSpec
    from disagg.processes.rank_group import started_group
    from engine.assembly.leader import build_engine
    from engine.config import EngineConfig
    from engine.model_files.model_config import WIDE_MODEL_PATH, load_model_config

    config = EngineConfig(
        model_path=WIDE_MODEL_PATH,
        dtype="float32",
        max_total_tokens=2048,
        max_running_requests=4,
        num_threads=1,
        **flags,
    )
    spec = SchedulerSpec(
        engine=config, disagg=DisaggConfig(), ipc_dir="", control_host="127.0.0.1", bootstrap=None, gpus=tuple(gpus)
    )
    model = load_model_config(WIDE_MODEL_PATH)
    with started_group(spec, model) as group:
        parts = build_engine(config, model, group=group)
        run = Run(parts, depth=parts.depth)
        for i, prompt in enumerate(prompts):
            run.add(str(i), prompt=prompt, new_tokens=NEW_TOKENS)
        run.drain()
        parts.executor.close()
    return run.tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lead", type=json.loads)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store", type=int)
    parser.add_argument("--backend")
    parser.add_argument("--device", type=torch.device)
    args = parser.parse_args()
    if args.lead is not None:
        found: dict[str, Any] = _lead(**args.lead)
    else:
        found = _rank(args.rank, args.store, backend=args.backend, device=args.device)
    print(json.dumps(found), flush=True)
    os._exit(0)  # NCCL's threads outlive a normal exit


if __name__ == "__main__":
    main()
