"""Measures a decode step of a random model with integer weights beside bf16, in turns in one process.

Of one thread its own seconds count, which others on the machine disturb less.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.measures import Row, Tables, in_turns
from benchmarks.random_model import SPECIAL_TOKENS, write_model
from engine.attention.torch_backend import CpuBackend
from engine.executor.decode_tapes import DecodeTapes
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch
from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from engine.quant.integers import SCHEMES, Scheme

BATCHES = (1, 8, 32)
PAGE_SIZE, TOKENS = 16, 64  # of a request in the cache
WARM_UP = 3  # a tape is recorded beside the first step and checked beside the second
FLOATS = "bf16"


class DecodeBatch(NamedTuple):
    """A decode step of requests whose KV is there. `ids`, `positions` [batch]: of the tokens that it computes."""

    backend: CpuBackend
    step: StepBatch
    ids: torch.Tensor
    positions: torch.Tensor


def decode_batch(model: DenseDecoder, vocab: int, batch: int) -> DecodeBatch:
    """Make a step of `batch` requests with `TOKENS` tokens in the cache, in pages that are scattered."""
    pages = -(-TOKENS // PAGE_SIZE)
    pool = KVPool(model.cache_specs(), num_pages=batch * pages, page_size=PAGE_SIZE, device="cpu")
    pool.buffer.zero_()  # memory that was never written is no memory yet
    draw = torch.Generator().manual_seed(batch)
    table = (torch.randperm(batch * pages, generator=draw) + 1).int().reshape(batch, pages)
    positions = torch.full((batch,), TOKENS - 1)
    step = StepBatch(
        extend=False,
        q_lens=[1] * batch,
        kv_lens=[TOKENS] * batch,
        page_table=table,
        slots=torch.arange(batch),
        token_pages=table[:, -1].long(),
        token_offsets=positions % PAGE_SIZE,
    )
    ids = SPECIAL_TOKENS + torch.randperm(vocab - SPECIAL_TOKENS, generator=draw)[:batch]
    return DecodeBatch(CpuBackend(pool), step, ids, positions)


def _step(model: DenseDecoder, batch: DecodeBatch) -> Callable[[], dict[str, float]]:
    """Return what computes the step to its logits, and says how long that took."""
    clock, tapes = (time.thread_time if torch.get_num_threads() == 1 else time.perf_counter), DecodeTapes()

    def one() -> dict[str, float]:
        batch.backend.begin(batch.step)
        begin_s = clock()
        model.logits(tapes.forward(model, batch.ids, batch.positions, batch.backend.attend))
        return {"ms": 1e3 * (clock() - begin_s)}

    return one


def measure_quantized(*, layers: int = 28, steps: int = 40, threads: int = 0) -> Tables:
    """bf16 and every scheme of `--quantization` in turns."""
    torch.set_num_threads(threads or os.cpu_count() or 1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tandem-quantized-") as folder, torch.inference_mode():
        write_model(Path(folder), layers=layers)
        config = load_model_config(folder)
        schemes: dict[str, Scheme | None] = {FLOATS: None, **SCHEMES}
        models = {
            name: load_model(
                folder,
                config,
                dtype="bfloat16",
                device="cpu",
                progress=False,
                quantization=None if scheme is None else name,
            )
            for name, scheme in schemes.items()
        }
        for size in BATCHES:
            ways = {n: _step(model, decode_batch(model, config.vocab_size, size)) for n, model in models.items()}
            found = in_turns(ways, steps, warm_up=WARM_UP)
            for name, scheme in schemes.items():
                read_gb = read_bytes(models[name], scheme) / 1e9
                row: Row = {"batch": size, "weights": name, "read in layers, GB": read_gb}
                ms = found[name]["ms"]
                rows.append(row | {"step, ms": ms, "times bf16's rate": found[FLOATS]["ms"] / ms})
    return {"": rows}


def read_bytes(model: DenseDecoder, scheme: Scheme | None) -> int:
    """Return the bytes of the layers' matrices, which a step reads."""
    count = sum(sum(site.shape.rows) * site.shape.width for site in model.linear_sites())
    if scheme is None:
        return 2 * count
    return count * scheme.bits // 8 + (8 * count // scheme.group if scheme.group else 0)
