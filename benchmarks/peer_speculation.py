"""N-gram speculation of Tandem and of vLLM's CPU build, each beside its own plain decoding: the same weights, texts and client.

usage: bash benchmarks/make_peers.sh DIR; python -m benchmarks.peer_speculation [--peers DIR] [--turns 2] [--rounds 2]
           [--tokens 192] [--batches 1 8] [--kinds edit quote schema foreign] [--only NAME ...] [--drafts 5] [--matches 2 4]
           [--output FILE]

Texts are those of benchmarks/speculation.py: a code edit, an answer that quotes, JSON of a schema, foreign text. SmolLM2 in bfloat16
(benchmarks/float_checkpoint.py). One server is up at a time, with all cores; it gets all cells, then the next; and so on for some turns,
the order of each turn reversed. A cell's first round is not counted: prompts are cached behind it. Figures are medians of rounds. Each
engine's own plain decoding is the measure of its speculation. `--drafts`, `--matches`: of vLLM, whose manual's example they are.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cpu_use import cpu_use
from benchmarks.float_checkpoint import write_smollm2
from benchmarks.peer_loads import Server
from benchmarks.peer_models import SMOLLM2, PeerModel
from benchmarks.peer_servers import N_GRAMS, TANDEM, VLLM, Start, installed, n_gram_starters
from benchmarks.peers import ROOT
from benchmarks.speculation import SCHEMA, bodies
from deploy.bench import environment
from deploy.bench.report import table

Row = dict[str, Any]
SERVERS = (TANDEM, TANDEM + N_GRAMS, VLLM, VLLM + N_GRAMS)


def completion(body: Mapping[str, Any], server: Server, *, kind: str) -> dict[str, Any]:
    """A body of /v1/completions, as both engines take it, of one of /generate."""
    sampling = body["sampling_params"]
    found = {
        "model": server.model,
        "prompt": body["text"],
        "max_tokens": sampling["max_new_tokens"],
        "temperature": sampling["temperature"],
        "seed": sampling.get("seed", 0),
        "ignore_eos": sampling["ignore_eos"],
    }
    if kind == "schema":
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "orders", "schema": SCHEMA}}
    return found


def tokens_of(server: Server, body: dict[str, Any]) -> int:
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        return int(json.load(response)["usage"]["completion_tokens"])


def rate(server: Server, asked: Sequence[dict[str, Any]]) -> float:
    """Output tokens a second of requests sent at once."""
    begin = time.monotonic()
    with ThreadPoolExecutor(len(asked)) as threads:
        tokens = sum(threads.map(lambda body: tokens_of(server, body), asked))
    return tokens / (time.monotonic() - begin)


def measure(starts: Mapping[str, Start], model: PeerModel, args: argparse.Namespace) -> list[Row]:
    """One row a (server, kind, batch, round)."""
    rows: list[Row] = []
    for turn in range(args.turns):
        for name in list(starts) if turn % 2 == 0 else reversed(list(starts)):
            with starts[name](model) as server:
                for kind in args.kinds:
                    for batch in args.batches:
                        rows += cell(name, server, kind, batch, args)
    return rows


def cell(name: str, server: Server, kind: str, batch: int, args: argparse.Namespace) -> list[Row]:
    asked = [completion(body, server, kind=kind) for body in bodies(kind, batch, tokens=args.tokens)]
    rate(server, asked)
    rows = []
    for _ in range(args.rounds):
        with cpu_use() as used:
            found = rate(server, asked)
        row = {"server": name, "kind": kind, "batch": batch, "tokens_s": found, "cores_left": used.cores_left}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def render(rows: Sequence[Row]) -> str:
    names = [name for name in SERVERS if any(row["server"] == name for row in rows)]
    header = ["answers", "batch", *(f"{name}, tokens/s" for name in names), "cores left"]
    ratios = {
        f"{TANDEM}: on/off": (TANDEM + N_GRAMS, TANDEM),
        f"{VLLM}: on/off": (VLLM + N_GRAMS, VLLM),
        f"{TANDEM}/{VLLM}: off": (TANDEM, VLLM),
        "on": (TANDEM + N_GRAMS, VLLM + N_GRAMS),
    }
    ratios = {title: pair for title, pair in ratios.items() if set(pair) <= set(names)}
    lines = []
    for kind, batch in dict.fromkeys((row["kind"], row["batch"]) for row in rows):
        own = [row for row in rows if (row["kind"], row["batch"]) == (kind, batch)]
        rates = {name: median(row["tokens_s"] for row in own if row["server"] == name) for name in names}
        line = [kind, str(batch), *(f"{rates[name]:.1f}" for name in names)]
        line.append(f"{median(row['cores_left'] for row in own):.1f}")
        lines.append([*line, *(f"{rates[a] / rates[b]:.2f}" for a, b in ratios.values())])
    return table([*header, *ratios], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=ROOT / ".build" / "peers", help="where make_peers.sh put them")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", default=["edit", "quote", "schema", "foreign"])
    parser.add_argument("--only", action="append", help="a server to measure; repeatable")
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--matches", type=int, nargs=2, default=[2, 4])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers' groups end with us
    starts = n_gram_starters(args.peers, drafts=args.drafts, matches=(args.matches[0], args.matches[1]))
    starts = {name: start for name, start in starts.items() if not args.only or name in args.only}
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-peers-"))) / "smollm2"
        write_smollm2(model)
        rows = measure(starts, PeerModel(name=SMOLLM2, folder=model), args)
    print(render(rows))
    if args.output is not None:
        result = {"environment": environment.describe(), "peers": installed(args.peers), "rows": rows}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
