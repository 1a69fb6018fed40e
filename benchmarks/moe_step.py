"""A decode step of a mixture of experts beside that of a dense model that reads as many bytes, in turns in one process.

usage: python -m benchmarks.moe_step [--layers 12] [--hidden 1024] [--experts 8] [--per-token 2] [--intermediate 2720] [--tokens 64]
                                     [--steps 40] [--threads N] [--output FILE]

Random checkpoints: 8 experts of 0.1B, two of which a token takes. How many experts a step reads follows from its tokens, which are
drawn; it is counted. The dense model's MLPs are as wide as these experts together. The limit of a step is the time in which as many
threads read the bytes of its weights (the experts that it reads alone) and of its KV, at the rate measured in the same run.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.neighbour_steps import decode_batch
from benchmarks.random_model import HEAD_DIM, KV_HEADS, SPECIAL_TOKENS, Experts, write_model
from benchmarks.step_time import read_rate
from deploy.bench import environment
from deploy.bench.report import table
from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model

BATCHES = (1, 4, 16)
PANEL = 32  # widths are multiples of it, as those of published models
WARM_UP = 3
BF16_BYTES = 2


class Steps:
    """The same decode step of `model` again and again: `batch` requests with `tokens` in the cache."""

    def __init__(self, model: DenseDecoder, vocab: int, batch: int, *, tokens: int) -> None:
        self._backend, self._step, self._positions = decode_batch(model, batch, tokens=tokens, order=torch.arange)
        draw = torch.Generator().manual_seed(batch)
        self._ids = SPECIAL_TOKENS + torch.randperm(vocab - SPECIAL_TOKENS, generator=draw)[:batch]
        self._model = model

    def run(self) -> float:
        """Seconds of a step: of one thread those that it computes, which others on the machine disturb less."""
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._backend.begin(self._step)
        begin = clock()
        self._compute()
        return clock() - begin

    def _compute(self) -> None:
        self._model.forward(self._ids, self._positions, self._backend.attend)


@dataclass(frozen=True)
class Loaded:
    """A random model, its vocabulary, and the bytes of what a forward can read: all weights but the embedding's."""

    model: DenseDecoder
    vocab: int
    weight_bytes: int


def load(folder: Path, **shape: Any) -> Loaded:
    all_bytes = write_model(folder, **shape)
    config = load_model_config(str(folder))
    model = load_model(str(folder), config, dtype="bfloat16", device="cpu", progress=False)
    return Loaded(model, config.vocab_size, all_bytes - config.vocab_size * config.hidden_size * BF16_BYTES)


def experts_read(model: DenseDecoder, steps: Steps) -> float:
    """The mean over layers of the experts that a step reads."""
    mixtures = list(model.mixtures().values())
    before = [mixture.loads.clone() for mixture in mixtures]
    steps.run()
    read = [int((mixture.loads - old > 0).sum()) for mixture, old in zip(mixtures, before, strict=True)]
    return sum(read) / len(read)


def measure_all(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    shape, rows = {"layers": args.layers, "hidden": args.hidden}, []
    experts = Experts(args.experts, args.per_token)
    mixture = load(folder / "mixture", intermediate=args.intermediate, experts=experts, **shape)
    expert_bytes = args.layers * 3 * args.intermediate * args.hidden * BF16_BYTES  # one in each layer
    kv_bytes = args.tokens * args.layers * 2 * KV_HEADS * HEAD_DIM * BF16_BYTES  # of a request
    clock = time.process_time if args.threads == 1 else time.perf_counter  # as `Steps.run` counts
    rates = [read_rate(args.threads, clock=clock)]
    with tqdm(total=len(BATCHES) * args.steps, unit="step", disable=None) as bar:
        for batch in BATCHES:
            ours = Steps(mixture.model, mixture.vocab, batch, tokens=args.tokens)
            read = experts_read(mixture.model, ours)
            wide = round(read * args.intermediate / PANEL) * PANEL
            twin = load(folder / f"dense{batch}", intermediate=wide, **shape)
            dense = Steps(twin.model, twin.vocab, batch, tokens=args.tokens)
            times: list[tuple[float, float]] = []
            for _ in range(args.steps):
                times.append((ours.run(), dense.run()))
                bar.update()
            mixture_s, dense_s = zip(*times[WARM_UP:], strict=True)
            rates.append(read_rate(args.threads, 3, clock=clock))
            rows.append(
                {
                    "batch": batch,
                    "experts_read": read,
                    "read_bytes": mixture.weight_bytes - (args.experts - read) * expert_bytes + batch * kv_bytes,
                    "mixture_ms": 1000 * median(mixture_s),
                    "dense_ms": 1000 * median(dense_s),
                    "ratio": median(ours / theirs for ours, theirs in times[WARM_UP:]),
                    "ratio_of_best": min(mixture_s) / min(dense_s),
                }
            )
    for row in rows:
        row["limit_ms"] = 1000 * row["read_bytes"] / max(rates)
    return rows


def render(result: dict[str, Any]) -> str:
    """The table of a result (benchmarks/report.py uses it too)."""
    head = [
        "batch",
        "experts read in a layer",
        "mixture, ms",
        "limit, ms",
        "of the limit",
        "dense, ms",
        "times as long",
    ]
    head += ["of the best steps"]
    return table(
        head,
        [
            [
                str(r["batch"]),
                f"{r['experts_read']:.1f}",
                f"{r['mixture_ms']:.1f}",
                f"{r['limit_ms']:.1f}",
                f"{100 * r['limit_ms'] / r['mixture_ms']:.0f} %",
                f"{r['dense_ms']:.1f}",
                f"{r['ratio']:.2f}",
                f"{r['ratio_of_best']:.2f}",
            ]
            for r in result["rows"]
        ],
    )


def run_steps(
    parser: argparse.ArgumentParser,
    name: str,
    measure: Callable[[argparse.Namespace, Path], list[dict[str, Any]]],
    render: Callable[[dict[str, Any]], str],
) -> None:
    """Read the arguments, to which those of `Steps` are added, `measure` in an empty folder, and print the table."""
    parser.add_argument("--tokens", type=int, default=64, help="of each request in the cache")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix=f"tandem-{name}-") as folder, torch.inference_mode():
        rows = measure(args, Path(folder))
    result = {"environment": environment.describe(), "threads": args.threads, "rows": rows}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--per-token", type=int, default=2)
    parser.add_argument("--intermediate", type=int, default=2720, help="of each expert")
    run_steps(parser, "moe", measure_all, render)


if __name__ == "__main__":
    main()
