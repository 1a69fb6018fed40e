"""Products of weights by each kind of arithmetic that this CPU has (engine/kernels/cpu_kind.py), in turns in one process.

usage: python -m benchmarks.kinds [--kinds avx2 amx ...] [--forms bf16 int8wo int4wo-128] [--mib 96] [--rounds 7] [--threads 1] [--output FILE]

The four matrices of a layer of Qwen3-0.6B. GB/s: of weights, as they lie in memory, for 1, 2 and 8 rows; each kind has as
many layers as take --mib in bf16, which caches should not hold. GFLOP/s: of one layer for 16 to 1,024 rows. Beside it, torch's
product of bf16, and that of oneDNN with weights in its own layout. Medians; of one thread its own seconds count, which others on the machine disturb less.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from deploy.bench import environment
from deploy.bench.report import table
from engine.kernels.build import cpu_kinds, load_library
from engine.kernels.cpu_kind import Kind
from engine.kernels.linear import SOURCE, LinearKernel
from engine.quant.online import SCHEMES, quantized

LAYER = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))  # qkv, o, gate and up, down: outputs, inputs
FLOATS = "bf16"
FEW, MANY = (1, 2, 8), (16, 64, 256, 1024)
LAYER_PARAMS = sum(outputs * inputs for outputs, inputs in LAYER)

Product = Callable[[Tensor], Tensor]
Run = Callable[[int], None]


def weights_of() -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=random).bfloat16() for shape in LAYER]


class Products:
    """The matrices of some layers, one kind's or torch's."""

    def __init__(self, products: Sequence[Sequence[Product]], inputs: Mapping[tuple[int, int], Tensor]) -> None:
        self._layers, self._inputs = products, inputs

    def run(self, rows: int) -> None:
        for layer in self._layers if rows in FEW else self._layers[:1]:
            for product, (_, width) in zip(layer, LAYER, strict=True):
                product(self._inputs[rows, width])

    def count(self, rows: int) -> int:
        """Layers of a run."""
        return len(self._layers) if rows in FEW else 1


def of_kind(kind: Kind, form: str, layers: int, inputs: Mapping[tuple[int, int], Tensor]) -> Products:
    library = load_library(SOURCE, kind=kind)
    assert library is not None, "no compiler"
    kernel = LinearKernel(library)
    own = [w if form == FLOATS else quantized(w, SCHEMES[form]) for w in weights_of()]
    packed = [[kernel.pack(weight, None) for weight in own] for _ in range(layers)]
    return Products([[matrix.times for matrix in layer] for layer in packed], inputs)


def of_torch(layers: int, inputs: Mapping[tuple[int, int], Tensor]) -> Products:
    def product(weight: Tensor) -> Product:
        return lambda x: torch.nn.functional.linear(x, weight)

    return Products([[product(w.clone()) for w in weights_of()] for _ in range(layers)], inputs)


def of_onednn(layers: int, inputs: Mapping[tuple[int, int], Tensor]) -> Products:
    def product(weight: Tensor) -> Product:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    return Products([[product(w) for w in weights_of()] for _ in range(layers)], inputs)


def bytes_of(form: str) -> float:
    return LAYER_PARAMS * (2 if form == FLOATS else SCHEMES[form].bits / 8)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(args.threads)
    layers = -(-args.mib * 2**20 // (2 * LAYER_PARAMS))
    inputs = {(rows, width): torch.randn(rows, width).bfloat16() for rows in (*FEW, *MANY) for _, width in LAYER}
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    rows_of_table = []
    for form in args.forms:
        measured = {kind.label: of_kind(kind, form, layers, inputs) for kind in args.kinds}
        if form == FLOATS:
            measured |= {"torch": of_torch(layers, inputs), "onednn": of_onednn(layers, inputs)}
        seconds: dict[tuple[str, int], list[float]] = {}
        for _ in tqdm(range(args.rounds), desc=form):
            for name, products in measured.items():
                for rows in (*FEW, *MANY):
                    begun = clock()
                    products.run(rows)
                    seconds.setdefault((name, rows), []).append((clock() - begun) / products.count(rows))
        for name in measured:
            own = {rows: median(seconds[name, rows]) for rows in (*FEW, *MANY)}
            rate = {f"gb_s_{rows}_rows": bytes_of(form) / own[rows] / 1e9 for rows in FEW}
            rate |= {f"gflop_s_{rows}_rows": 2 * LAYER_PARAMS * rows / own[rows] / 1e9 for rows in MANY}
            rows_of_table.append({"form": form, "kind": name, **rate})
    return rows_of_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of_label = {kind.label: kind for kind in cpu_kinds()}
    parser.add_argument("--kinds", nargs="+", choices=list(of_label), default=list(of_label))
    parser.add_argument("--forms", nargs="+", choices=[FLOATS, *SCHEMES], default=[FLOATS, "int8wo", "int4wo-128"])
    parser.add_argument("--mib", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.kinds = [of_label[label] for label in args.kinds]
    found = measure(args)
    head = ["form", "kind", *(f"{rows} rows, GB/s" for rows in FEW), *(f"{rows} rows, GFLOP/s" for rows in MANY)]
    print(
        table(
            head,
            [[str(v) if isinstance(v, str) else f"{v:.1f}" for v in row.values()] for row in found],
        )
    )
    if args.output:
        args.output.write_text(json.dumps({"environment": environment.describe(), "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
