"""What the three ways to resume a retracted request cost: one prefill and one decode worker, decode's memory too small.

usage: python -m benchmarks.retraction_ways [--rounds 3] [--requests 24] [--layers 8] [--hidden 512] [--json FILE]

A random model (benchmarks/random_model.py), the same load on each way in turn, ROUNDS times; medians. No reserve, so that
decode retracts often. "roomy" has memory for all: what the retractions cost altogether. On one machine prefill computes with
the cores that decode would use, so this shows what a way costs, not what a prefill worker of its own would gain.
"""

import argparse
import json
import statistics
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.cluster import Cluster, load, tandem_up
from benchmarks.random_model import write_model
from deploy.bench import environment
from deploy.bench.report import table

INPUT_LEN, OUTPUT_LEN, TOKENS = 256, 384, 6144
FLAGS = ("--num-reserved-decode-tokens", "0", "--schedule-conservativeness", "0", "--log-level", "warning")
WAYS = ("recompute", "host", "prefill")
COUNTERS = ("retractions", "resumed_computed", "resumed_restored", "resumed_through_prefill", "recompute_failed")


def run_once(way: str, model: Path, *, requests: int) -> dict[str, float]:
    """`way`: of WAYS, or "roomy"."""
    tokens = TOKENS if way != "roomy" else 2 * requests * (INPUT_LEN + OUTPUT_LEN)
    flags = [*FLAGS, "--model-path", str(model), "--max-total-tokens", str(tokens)]
    flags += ["--disaggregation-decode-retraction-backup", way] if way != "roomy" else []
    with tandem_up(*flags) as cluster:
        (summary,) = load(
            url=cluster.url,
            num_requests=requests,
            concurrency=requests,
            input_len=INPUT_LEN,
            output_len=OUTPUT_LEN,
            prompt="ids",
        )
        counters = decode_counters(cluster)
    assert summary.itl_s is not None
    speed = {"output_tok_s": summary.output_tokens_per_s, "itl_p99_ms": 1000 * summary.itl_s.p99}
    return {**speed, "longest_gap_ms": 1000 * summary.itl_s.max, **{name: counters.get(name, 0.0) for name in COUNTERS}}


def decode_counters(cluster: Cluster) -> dict[str, float]:
    (url,) = [url for role, url in cluster.workers if role == "decode"]
    with urllib.request.urlopen(f"{url}/check", timeout=30) as response:
        return dict(json.load(response)["counters"])


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def render(found: dict[str, dict[str, float]]) -> str:
    base = found["roomy"]["output_tok_s"]
    names = ["output_tok_s", "itl_p99_ms", "longest_gap_ms", *COUNTERS]
    rows = [
        [way, f"{one['output_tok_s'] / base:.2f}", *(f"{one[name]:.0f}" for name in names)]
        for way, one in found.items()
    ]
    return table(["way", "tok/s, of roomy", *names], rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ("roomy", *WAYS)}
    with tempfile.TemporaryDirectory(prefix="tandem-model-") as folder:
        write_model(Path(folder), layers=args.layers, hidden=args.hidden)
        for _ in range(args.rounds):
            for way, done in rounds.items():
                done.append(run_once(way, Path(folder), requests=args.requests))
                print(way, done[-1], file=sys.stderr, flush=True)
    found = {way: medians(done) for way, done in rounds.items()}
    print(render(found))
    if args.json:
        result: dict[str, Any] = {"environment": environment.describe(), "medians": found, "rounds": rounds}
        args.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
