"""What KV of 8 bits costs in quality: perplexity of a text beside KV of bf16, and how often the likeliest next token is the same.

usage: python -m benchmarks.kv_quality TEXT [TEXT ...] [--model-path smollm2] [--context 2048] [--most 16384] [--output FILE]

A text is a file, or a folder's *.md one after another. It is read in pieces of --context tokens, each computed in chunks, so that nearly
all KV is read from the cache. At each place the right tokens came before: agreement is not spoiled by an earlier difference.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from deploy.bench import environment
from deploy.bench.report import table
from engine.attention.cpu_backend import CpuBackend
from engine.config import EngineConfig
from engine.flags.model_source import with_local_model
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch
from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.text.tokenizer import load_tokenizer

PAGE_SIZE, CHUNK = 16, 256


def logits_of(model: DenseDecoder, ids: torch.Tensor, *, fp8: bool) -> Iterator[torch.Tensor]:
    """Yield [rows, vocabulary] of each chunk of `ids`."""
    pages = -(-len(ids) // PAGE_SIZE)
    specs = [replace(spec, fp8=fp8) for spec in model.cache_specs()]
    backend = CpuBackend(KVPool(specs, num_pages=pages, page_size=PAGE_SIZE, device="cpu"))
    order = torch.arange(1, pages + 1, dtype=torch.int32)[None]
    for at in torch.arange(len(ids)).split(CHUNK):
        step = StepBatch(
            extend=True,
            q_lens=[len(at)],
            kv_lens=[int(at[-1]) + 1],
            page_table=order,
            slots=torch.zeros(1, dtype=torch.int64),
            token_pages=order[0, at // PAGE_SIZE].long(),
            token_offsets=at % PAGE_SIZE,
            riders=[],
        )
        backend.begin(step)
        logits = model.logits(model.forward(ids[at], at, backend.attend))
        assert logits is not None, "one stage"
        yield logits


def text_of(path: Path) -> str:
    files = sorted(path.glob("*.md")) if path.is_dir() else [path]
    return "\n".join(file.read_text() for file in files)


def compare(model: DenseDecoder, ids: list[int], *, context: int) -> dict[str, Any]:
    """Perplexities with both kinds of KV, and the share of places with the same likeliest token."""
    loss, same, places = {False: 0.0, True: 0.0}, 0, 0
    with torch.inference_mode(), tqdm(total=len(ids), unit="token", disable=None) as bar:
        for piece in torch.tensor(ids).split(context):
            right = piece[1:].split(CHUNK)
            both = zip(logits_of(model, piece[:-1], fp8=False), logits_of(model, piece[:-1], fp8=True), strict=True)
            for wanted, (plain, short) in zip(right, both, strict=True):
                for fp8, logits in ((False, plain), (True, short)):
                    loss[fp8] += float(torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="sum"))
                same += int((plain.argmax(-1) == short.argmax(-1)).sum())
                places += len(wanted)
                bar.update(len(wanted))
    perplexity = {fp8: math.exp(total / places) for fp8, total in loss.items()}
    return {"tokens": places, "bf16": perplexity[False], "fp8": perplexity[True], "same": same / places}


def render(result: dict[str, Any]) -> str:
    """The table of a result (benchmarks/report.py uses it too)."""
    return table(
        [f"{result['model']} reads", "tokens", "perplexity, bf16 KV", "fp8 KV", "same likeliest token"],
        [
            [r["text"], str(r["tokens"]), f"{r['bf16']:.2f}", f"{r['fp8']:.2f}", f"{100 * r['same']:.1f} %"]
            for r in result["rows"]
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--most", type=int, default=16384, help="tokens of a text")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    path = with_local_model(EngineConfig(model_path=args.model_path)).model_path
    tokenizer = load_tokenizer(path)
    model = load_model(path, load_model_config(path), dtype="bfloat16", device="cpu", progress=True)
    rows = []
    for text in args.texts:
        ids = tokenizer.encode(text_of(text))[: args.most]
        rows.append({"text": text.name, **compare(model, ids, context=args.context)})
    result = {"environment": environment.describe(), "model": Path(args.model_path).name, "rows": rows}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
