"""Chains and trees of drafts beside plain decoding, on real texts: unified workers in turns, output tokens a second, the same tokens.

usage: python -m benchmarks.train_eagle EAGLE; python -m benchmarks.tree_speed EAGLE [--topk 1 2 4] [--steps 5] [--tokens 192]
           [--rounds 3] [--batches 1 4] [--kinds story code] [--temperatures 0 1] [--threads 1] [--output FILE]

SmolLM2 in bfloat16 is the model, and the EAGLE layer of benchmarks/train_eagle.py drafts. Texts repeat little of what came before, so n-grams
would draft little.

    story   another text behind a file of this project
    code    what stands behind the first part of such a file

A cell's first round is not counted. Figures are medians; `same`: whether the tokens are those of plain decoding.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks.cluster import ROOT, tandem_up
from benchmarks.float_checkpoint import write_smollm2
from benchmarks.speculation import FILES, bodies, measure
from deploy.bench import environment
from deploy.bench.report import table

PLAIN = "plain"
CODE_CHARS = 2500


def asked_of(kind: str, count: int, *, tokens: int, temperature: float) -> list[dict[str, Any]]:
    if kind == "story":
        asked = bodies("foreign", count, tokens=tokens)
    else:
        texts = [(ROOT / FILES[i % len(FILES)]).read_text()[:CODE_CHARS] for i in range(count)]
        asked = [{"text": text, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}} for text in texts]
    for i, body in enumerate(asked):
        body["sampling_params"] |= {"temperature": temperature, "seed": i}
    return asked


def compare(urls: Mapping[str, str], asked: list[dict[str, Any]], *, rounds: int) -> list[dict[str, Any]]:
    """One row a worker."""
    rates, answers = {name: list[float]() for name in urls}, dict[str, list[dict[str, Any]]]()
    for number in range(rounds + 1):
        for name in list(urls) if number % 2 else reversed(list(urls)):
            rate, answers[name] = measure(urls[name], asked)
            rates[name] += [rate] if number else []
    return [
        {
            "name": name,
            "tokens_s": median(rates[name]),
            "ratio": median(rates[name]) / median(rates[PLAIN]),
            "accept_length": sum(a["meta_info"].get("spec_accept_length", 1.0) for a in answers[name]) / len(asked),
            "same": [a["output_ids"] for a in answers[name]] == [a["output_ids"] for a in answers[PLAIN]],
        }
        for name in urls
    ]


def flags_of(topk: int, args: argparse.Namespace) -> tuple[str, ...]:
    by = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(args.eagle))
    return (*by, "--speculative-num-steps", str(args.steps), "--speculative-eagle-topk", str(topk))


def measured(model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    common = ("--unified", "--model-path", str(model), "--num-threads", str(args.threads))
    with ExitStack() as stack:
        urls = {PLAIN: stack.enter_context(tandem_up(*common)).url}
        for topk in args.topk:
            name = "chain" if topk == 1 else f"tree of {topk}"
            urls[name] = stack.enter_context(tandem_up(*common, *flags_of(topk, args))).url
        cells = [(kind, t, batch) for kind in args.kinds for t in args.temperatures for batch in args.batches]
        rows: list[dict[str, Any]] = []
        for kind, temperature, batch in tqdm(cells, unit="cell", disable=None):
            asked = asked_of(kind, batch, tokens=args.tokens, temperature=temperature)
            cell = {"kind": kind, "temperature": temperature, "batch": batch}
            rows += [cell | row for row in compare(urls, asked, rounds=args.rounds)]
    return rows


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["text", "T", "batch", "drafts", "tokens/s", "of plain", "tokens a step", "same"]
    lines = [
        [
            row["kind"],
            f"{row['temperature']:g}",
            str(row["batch"]),
            row["name"],
            f"{row['tokens_s']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['accept_length']:.2f}",
            "yes" if row["same"] else "NO",
        ]
        for row in rows
    ]
    return table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("eagle", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--topk", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--kinds", nargs="+", default=["story", "code"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-trees-") as folder:
        model = Path(folder) / "smollm2"
        write_smollm2(model)
        rows = measured(model, args)
    print(render(rows))
    if args.output is not None:
        args.output.write_text(json.dumps({"environment": environment.describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
