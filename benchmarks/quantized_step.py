"""A decode step with weights of 8 and 4 bits beside bf16, in turns in one process: `--quantization`.

usage: python -m benchmarks.quantized_step [--layers 28] [--hidden 1024] [--tokens 64] [--steps 40] [--threads N] [--output FILE]

A random checkpoint in the shape of Qwen3-0.6B with a small vocabulary. A step is a played tape and the output layer. Of one thread its
own seconds count, which others on the machine disturb less.
"""

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks.moe_step import Steps, run_steps
from benchmarks.random_model import write_model
from deploy.bench.report import table
from engine.executor.decode_tapes import DecodeTapes
from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.quant.online import SCHEMES, Scheme

BATCHES = (1, 4, 16)
WARM_UP = 3  # the first steps of a size are computed without its tape
FLOATS = "bf16"


class TapedSteps(Steps):
    """Played steps, and the logits of each."""

    def __init__(self, model: DenseDecoder, vocab: int, batch: int, *, tokens: int) -> None:
        super().__init__(model, vocab, batch, tokens=tokens)
        self._tapes = DecodeTapes()

    def _compute(self) -> None:
        hidden = self._tapes.forward(self._model, self._ids, self._positions, self._backend.attend)
        self._model.logits(hidden)


def read_bytes(model: DenseDecoder, scheme: Scheme | None) -> int:
    """Of the layers' matrices, in a step."""
    count = sum(sum(site.shape.rows) * site.shape.width for site in model.linear_sites())
    if scheme is None:
        return 2 * count
    return count * scheme.bits // 8 + (8 * count // scheme.group if scheme.group else 0)


def measure_all(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    write_model(folder, layers=args.layers, hidden=args.hidden)
    config, rows = load_model_config(str(folder)), []
    schemes: dict[str, Scheme | None] = {FLOATS: None, **SCHEMES}
    models = {
        name: load_model(
            str(folder),
            config,
            dtype="bfloat16",
            device="cpu",
            progress=False,
            quantization=None if scheme is None else name,
        )
        for name, scheme in schemes.items()
    }
    with tqdm(total=len(BATCHES) * args.steps, unit="step", disable=None) as bar:
        for batch in BATCHES:
            steps = {n: TapedSteps(m, config.vocab_size, batch, tokens=args.tokens) for n, m in models.items()}
            times: list[dict[str, float]] = []
            for _ in range(args.steps):
                times.append({name: of.run() for name, of in steps.items()})
                bar.update()
            times = times[WARM_UP:]
            rows += [
                {
                    "batch": batch,
                    "weights": name,
                    "gb": read_bytes(models[name], scheme) / 1e9,
                    "step_ms": 1000 * median(each[name] for each in times),
                    "gain": median(each[FLOATS] / each[name] for each in times),
                    "gain_of_best": min(each[FLOATS] for each in times) / min(each[name] for each in times),
                }
                for name, scheme in schemes.items()
            ]
    return rows


def render(result: dict[str, Any]) -> str:
    """The table of a result."""
    head = ["batch", "weights", "read in layers, GB", "step, ms", "times bf16's rate", "of the best steps"]
    lines = [
        [
            str(r["batch"]),
            r["weights"],
            f"{r['gb']:.2f}",
            f"{r['step_ms']:.1f}",
            f"{r['gain']:.2f}",
            f"{r['gain_of_best']:.2f}",
        ]
        for r in result["rows"]
    ]
    return table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    run_steps(parser, "quantized", measure_all, render)


if __name__ == "__main__":
    main()
