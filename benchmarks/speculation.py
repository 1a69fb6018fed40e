"""Speculation by n-grams beside plain decoding, two unified workers in turns: output tokens a second, the same tokens.

usage: python -m benchmarks.speculation [--model-path smollm2] [--tokens 256] [--rounds 5] [--batches 1 8] [--output FILE]

    edit     a file of this project, and its first lines again: the answer repeats it, as a code edit does
    quote    passages, and the beginning of one as a quotation: the answer quotes on
    schema   constrained by a JSON schema with long names; without speculation what the schema forces is computed together, too
    foreign  another text than the prompt's, sampled at temperature 1: nothing repeats

Prompts are cached: the first round, which is not counted, has computed them.
"""

import argparse
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks.cluster import ROOT, tandem_up
from deploy.bench import environment
from deploy.bench.report import table

FILES = ("engine/core/growth.py", "engine/core/eviction.py", "engine/core/stages.py", "engine/core/backups.py")
FILES += ("engine/core/times.py", "engine/core/finish.py", "engine/core/preemption.py", "engine/core/held.py")
PASSAGES = ("docs/chat.md", "docs/lora.md", "docs/gpu.md", "docs/limits.md")
PASSAGES += ("docs/tuning.md", "docs/router.md", "docs/deploy.md", "docs/planning.md")
BEGIN_LINES, BEGIN_CHARS, MOST_CHARS = 3, 60, 4000
SCHEMA = {
    "type": "array",
    "minItems": 4,
    "items": {
        "type": "object",
        "properties": {
            "customer_identifier": {"type": "integer"},
            "delivery_address_country": {"enum": ["France", "Finland", "Germany"]},
            "number_of_items_ordered": {"type": "integer"},
            "payment_was_received": {"type": "boolean"},
        },
        "required": [
            "customer_identifier",
            "delivery_address_country",
            "number_of_items_ordered",
            "payment_was_received",
        ],
        "additionalProperties": False,
    },
}


def bodies(kind: str, count: int, *, tokens: int) -> list[dict[str, Any]]:
    return [_body(kind, i, tokens=tokens) for i in range(count)]


def _body(kind: str, i: int, *, tokens: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": kind != "schema"}
    if kind == "edit":
        text = (ROOT / FILES[i % len(FILES)]).read_text()[:MOST_CHARS]
        prompt = f"{text}\n\n# The same file, once more:\n\n" + "\n".join(text.splitlines()[:BEGIN_LINES]) + "\n"
    elif kind == "quote":
        text = (ROOT / PASSAGES[i % len(PASSAGES)]).read_text()[:MOST_CHARS]
        begin = text[len(text) // 3 :][:BEGIN_CHARS]
        prompt = f"{text}\n\nQuestion: what does the passage say? Answer, as a quotation:\n\n{begin}"
    elif kind == "schema":
        prompt = f"Orders of customers {i} to {i + 3} as a JSON list, one object each:\n"
        sampling["json_schema"] = json.dumps(SCHEMA)
    else:
        text = (ROOT / FILES[i % len(FILES)]).read_text()[:MOST_CHARS]
        prompt = f"{text}\n\nA story about the sea. Once upon a time,"
        sampling |= {"temperature": 1.0, "seed": i}
    return {"text": prompt, "sampling_params": sampling}


def answer(url: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/generate", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return dict(json.load(response))


def measure(url: str, asked: list[dict[str, Any]]) -> tuple[float, list[dict[str, Any]]]:
    """Return (output tokens a second, answers) of requests sent at once."""
    begin = time.monotonic()
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(lambda body: answer(url, body), asked))
    taken_s = time.monotonic() - begin
    return sum(a["meta_info"]["completion_tokens"] for a in answers) / taken_s, answers


def compare(off: str, on: str, kind: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    asked = bodies(kind, batch, tokens=args.tokens)
    rates: dict[str, list[float]] = {off: [], on: []}
    tokens = {}
    for number in range(args.rounds + 1):
        for url in (off, on) if number % 2 else (on, off):
            rate, answers = measure(url, asked)
            tokens[url] = [a["output_ids"] for a in answers]
            rates[url] += [rate] if number else []
            if url == on:
                infos = [a["meta_info"] for a in answers]
    same = tokens[off] == tokens[on]
    return {
        "kind": kind,
        "batch": batch,
        "off_tokens_s": median(rates[off]),
        "on_tokens_s": median(rates[on]),
        "ratio": median(rates[on]) / median(rates[off]),
        "accept_length": sum(i.get("spec_accept_length", 1.0) for i in infos) / len(infos),
        "same_tokens": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", default=["edit", "quote", "schema", "foreign"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    common = ("--unified", "--model-path", args.model_path, "--num-threads", "1")
    common += ("--constrained-json-disable-any-whitespace",)
    with ExitStack() as stack:
        off = stack.enter_context(tandem_up(*common)).url
        on = stack.enter_context(tandem_up(*common, "--speculative-algorithm", "NGRAM")).url
        cells = [(kind, batch) for kind in args.kinds for batch in args.batches]
        rows = [compare(off, on, kind, batch, args) for kind, batch in tqdm(cells, unit="cell", disable=None)]
    header = ["answers", "batch", "off, tokens/s", "on", "ratio", "tokens a step", "same tokens"]
    shown = [
        [
            r["kind"],
            str(r["batch"]),
            f"{r['off_tokens_s']:.1f}",
            f"{r['on_tokens_s']:.1f}",
            f"{r['ratio']:.2f}",
            f"{r['accept_length']:.2f}",
            "yes" if r["same_tokens"] else "NO",
        ]
        for r in rows
    ]
    print(table(header, shown))
    if args.output is not None:
        args.output.write_text(json.dumps({"environment": environment.describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
