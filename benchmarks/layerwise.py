"""TTFT of long prompts with pages that leave layer by layer, whole, and without a transfer at all (unified).

usage: python -m benchmarks.layerwise [--backend nixl --backend mooncake] [--layers 8] [--hidden 1024] [--requests 5] [--prompt-len 2048]
       [--chunked-prefill-size 8192] [--output FILE]

A random checkpoint as wide as Qwen3-0.6B and of `--layers` layers (fewer than its 28, so that a run is short: the share
of the transfer in the time of a layer is the same). Three clusters are up at the same time, one has load at a time: requests
in turns, one in flight. Prompts are random token ids, so nothing is cached.
"""

import argparse
import json
import random
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import tandem_up
from benchmarks.random_model import write_model
from deploy.bench import environment
from deploy.bench.report import table

PROMPT_LENS = (2048, 8192)
TOKEN_IDS = (16, 500)
ANSWER_S = 300.0
MAX_TOKENS = 20_000
FLAG = "--disaggregation-layerwise-transfer"


def ttft_ms(url: str, prompt: list[int]) -> float:
    """Milliseconds until the whole answer of one token is there."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", data=json.dumps(body).encode(), headers=headers)
    begin = time.monotonic()
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        answer.read()
    return 1000 * (time.monotonic() - begin)


def measure(backend: str, *, model: str, lengths: list[int], requests: int, chunk: int) -> list[dict[str, Any]]:
    """A row for each prompt length: what each request took, by way."""
    common = ("--model-path", model, "--max-total-tokens", str(MAX_TOKENS), "--chunked-prefill-size", str(chunk))
    common += ("--max-step-time", "0")  # chunks of this size, however long they take
    pd = ("--transfer-backend", backend, *common, FLAG)
    ways = {"unified": ("--unified", *common), "whole": (*pd, "off"), "layers": (*pd, "on")}
    rows, draw = [], random.Random(0)
    with ExitStack() as stack:
        urls = {way: stack.enter_context(tandem_up(*args)).url for way, args in ways.items()}
        for length in lengths:
            taken: dict[str, list[float]] = {way: [] for way in urls}
            for turn in range(requests + 1):  # the first warms up
                for way, url in urls.items():
                    one_ms = ttft_ms(url, [draw.randrange(*TOKEN_IDS) for _ in range(length)])
                    taken[way] += [one_ms] * (turn > 0)
            rows.append({"backend": backend, "prompt_len": length, "taken_ms": taken})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def render(result: dict[str, Any]) -> str:
    """The table of a result (benchmarks/report.py uses it too)."""
    rows = []
    for row in result["rows"]:
        for name, of in (("best", min), ("p50", median)):
            alone, whole, layers = (of(row["taken_ms"][way]) for way in ("unified", "whole", "layers"))
            label = f"{row['backend']}, {row['prompt_len']} tokens, {name}"
            figures = [f"{value:.1f}" for value in (alone, whole, layers)]
            rows.append([label, *figures, f"{whole - alone:+.1f}", f"{layers - alone:+.1f}", f"{whole - layers:+.1f}"])
    header = ["TTFT, ms", "unified", "PD, pages whole", "PD, by layers", "whole adds", "by layers adds", "gained"]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=("nixl", "mooncake"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--prompt-len", type=int, action="append")
    parser.add_argument("--chunked-prefill-size", type=int, default=8192)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        write_model(Path(folder), layers=args.layers, hidden=args.hidden)
        for backend in args.backend or ("nixl", "mooncake"):
            lengths = args.prompt_len or list(PROMPT_LENS)
            rows += measure(
                backend, model=folder, lengths=lengths, requests=args.requests, chunk=args.chunked_prefill_size
            )
    settings = {
        "layers": args.layers,
        "hidden": args.hidden,
        "chunked_prefill_size": args.chunked_prefill_size,
        "requests": args.requests,
    }
    result = {"environment": environment.describe(), **settings, "rows": rows}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
