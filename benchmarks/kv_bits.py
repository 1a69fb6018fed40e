"""Measures KV of 8 bits beside bf16 on a CPU: the quality of a model's guesses, and the time of attention."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.cluster import ROOT
from benchmarks.measures import Measure, Row, Tables
from engine.attention.cpu_backend import CpuBackend
from engine.config import EngineConfig
from engine.flags.model_source import with_local_model
from engine.kernels.paged_decode import make_paged_decode
from engine.kernels.paged_extend import make_paged_extend
from engine.kernels.softmax import plain_softmax
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch
from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.text.tokenizer import load_tokenizer

PAGE_SIZE, CHUNK = 16, 256
HEADS, KV_HEADS, DIM = 16, 8, 128  # of Qwen3-0.6B
NEW = 512  # tokens of a prompt that attend in one step
TEXTS = ("docs/design", "/usr/share/common-licenses/GPL-3")


def _step(order: torch.Tensor, at: torch.Tensor) -> StepBatch:
    """Make a step of one request at positions `at`, the last of which is its last, with the pages [1, pages] of `order`."""
    return StepBatch(
        extend=len(at) > 1,
        q_lens=[len(at)],
        kv_lens=[int(at[-1]) + 1],
        page_table=order,
        slots=torch.zeros(1, dtype=torch.int64),
        token_pages=order[0, at // PAGE_SIZE].long(),
        token_offsets=at % PAGE_SIZE,
        riders=[],
    )


# ---- quality


def measure_quality(
    *, texts: tuple[str, ...] = TEXTS, model_path: str = "smollm2", context: int = 2048, most: int = 16384
) -> Tables:
    """A text is a file, or a folder's *.md one after another; `most` tokens of each are read in pieces of `context`."""
    path = with_local_model(EngineConfig(model_path=model_path)).model_path
    tokenizer = load_tokenizer(path)
    model = load_model(path, load_model_config(path), dtype="bfloat16", device="cpu", progress=True)
    rows: list[Row] = []
    for text in texts:
        found = ROOT / text
        files = sorted(found.glob("*.md")) if found.is_dir() else [found]
        ids = tokenizer.encode("\n".join(file.read_text() for file in files))[:most]
        rows.append({f"{Path(model_path).name} reads": found.name} | _quality(model, ids, context=context))
    return {"": rows}


def _quality(model: DenseDecoder, ids: list[int], *, context: int) -> Row:
    loss, same, places = {False: 0.0, True: 0.0}, 0, 0
    with torch.inference_mode():
        for piece in torch.tensor(ids).split(context):
            both = zip(_logits(model, piece[:-1], fp8=False), _logits(model, piece[:-1], fp8=True), strict=True)
            for wanted, (plain, short) in zip(piece[1:].split(CHUNK), both, strict=True):
                for fp8, logits in ((False, plain), (True, short)):
                    loss[fp8] += float(torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="sum"))
                same += int((plain.argmax(-1) == short.argmax(-1)).sum())
                places += len(wanted)
    perplexity = {fp8: math.exp(total / places) for fp8, total in loss.items()}
    agree = f"{100 * same / places:.1f} %"
    return {
        "tokens": places,
        "perplexity, bf16 KV": perplexity[False],
        "fp8 KV": perplexity[True],
        "same likeliest token": agree,
    }


def _logits(model: DenseDecoder, ids: torch.Tensor, *, fp8: bool) -> Iterator[torch.Tensor]:
    """Yield [rows, vocabulary] of each chunk of `ids`: nearly all KV is read from the cache."""
    pages = -(-len(ids) // PAGE_SIZE)
    specs = [replace(spec, fp8=fp8) for spec in model.cache_specs()]
    backend = CpuBackend(KVPool(specs, num_pages=pages, page_size=PAGE_SIZE, device="cpu"))
    order = torch.arange(1, pages + 1, dtype=torch.int32)[None]
    for at in torch.arange(len(ids)).split(CHUNK):
        backend.begin(replace(_step(order, at), extend=True))
        logits = model.logits(model.forward(ids[at], at, backend.attend))
        assert logits is not None, "one stage"
        yield logits


# ---- time


def measure_attention(*, layers: int = 28, rounds: int = 5, contexts: tuple[int, ...] = (1024, 4096, 16384)) -> Tables:
    """CPU seconds of one thread, the least of the rounds, in which both kinds take turns."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    for new in (1, NEW):
        for context in contexts:
            ways = [
                _reader(fp8=fp8, context=context, rows=new, layers=layers if new == 1 else 1) for fp8 in (False, True)
            ]
            best_ms = [math.inf, math.inf]
            for _ in range(rounds):
                for i, way in enumerate(ways):
                    begin_s = time.process_time()
                    way()
                    best_ms[i] = min(best_ms[i], 1e3 * (time.process_time() - begin_s))
            row: Row = {"new tokens of all": f"{new} of {context}", "bf16, ms": best_ms[0], "fp8, ms": best_ms[1]}
            rows.append(row | {"times as fast": best_ms[0] / best_ms[1]})
    return {"": rows}


def _reader(*, fp8: bool, context: int, rows: int, layers: int) -> Callable[[], None]:
    """Attend with the last `rows` tokens of a request of `context` tokens, in scattered pages of a pool of its own."""
    pages = -(-context // PAGE_SIZE)
    spec = CacheSpec(num_kv_heads=KV_HEADS, head_dim=DIM, dtype="bfloat16", fp8=fp8)
    pool = KVPool([spec] * layers, num_pages=pages, page_size=PAGE_SIZE, device="cpu")
    kernel = make_paged_decode(pool) if rows == 1 else make_paged_extend(pool)
    assert kernel is not None and CpuBackend(pool).has_kernel, "no C kernel here"
    order = (torch.randperm(pages, generator=torch.Generator().manual_seed(0)) + 1).int()[None]
    tokens = torch.arange(context)
    k, v = torch.randn(2, context, KV_HEADS, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    for layer in range(layers):
        pool.write(layer, order[0, tokens // PAGE_SIZE].long(), tokens % PAGE_SIZE, k, v)
    step, q = _step(order, tokens[-rows:]), torch.randn(rows, HEADS, DIM).bfloat16()
    attend = partial(kernel.attend_turned, q=q, k=k[-rows:], v=v[-rows:], softmax=plain_softmax(DIM))

    def read() -> None:
        kernel.begin(step)
        for layer in range(layers):
            attend(layer)

    return read


MEASURES = {
    "kv_quality": Measure(
        title="KV of 8 bits: quality",
        about="Perplexity of Tandem's design pages and of the GPL with `--kv-cache-dtype fp8_e4m3` beside bf16, in pieces of 2,048 tokens; how often the "
        "likeliest next token is the same, always after the right ones.",
        run=measure_quality,
        quick={"most": 600},
    ),
    "kv_dtype": Measure(
        title="KV of 8 bits: attention",
        about="Attention of a decode step over 28 layers, and of a prompt's last 512 tokens in one layer, with Qwen3-0.6B's heads: CPU time of one "
        "thread, the least of five rounds in turns.",
        run=measure_attention,
        quick={"layers": 2, "contexts": [1024]},
    ),
}
