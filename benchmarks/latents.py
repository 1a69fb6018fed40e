"""Latent attention on CPU: a decode step beside the bytes it reads, prompts absorbed beside prompts whose K and V are expanded, and
decode by the index of DeepSeek V3.2 beside the same without it.

usage: python -m benchmarks.latents [--heads 16] [--context 4096] [--layers 8] [--rounds 5] [--threads 1]

Sizes of DeepSeek V2 and V3: latents of 512 + 64, heads of 128 + 64 with values of 128; 16 heads are V2-Lite's, 128 V3's. "sum" is a
plain sum over as many bytes: what the memory gives. Expanded: each chunk multiplies all latents so far by kv_b, then torch's SDPA.
Times are CPU time, so that a busy machine disturbs them less.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from deploy.bench.report import table
from engine.attention.latent_sparse import SparseLatents
from engine.kernels.latent_attention import make_latent_kernel
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch
from engine.layers.latents import HeadProducts, NewLatents, TokenChooser
from engine.layers.linear import Linear

RANK, TURNED, PLAIN, VALUES = 512, 64, 128, 128
SPEC = CacheSpec(num_kv_heads=1, head_dim=RANK + TURNED, dtype="bfloat16", latent=RANK)
SCALE = (PLAIN + TURNED) ** -0.5
PAGE_SIZE = 16
INDEX = CacheSpec(num_kv_heads=1, head_dim=RANK + TURNED + 128, dtype="bfloat16", latent=RANK, index=128)
INDEX_HEADS, CHOSEN = 64, 2048
CONTEXTS = (2048, 4096, 16384, 32768)
CHUNKS = ((256, 256), (1024, 1024), (1024, 4096))  # (rows, context at their end)


class Layers:
    """Requests of one length in a pool larger than the caches; their new rows and what they are multiplied by."""

    def __init__(self, *, heads: int, rows: int, context: int, batch: int, layers: int, spec: CacheSpec = SPEC) -> None:
        pages = -(-context // PAGE_SIZE)
        self.pool = KVPool([spec] * layers, num_pages=batch * pages, page_size=PAGE_SIZE, device="cpu")
        self.pool.buffer.view(torch.bfloat16).copy_(torch.randn(self.pool.buffer.nbytes // 2))
        order = (torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)) + 1).int().view(batch, pages)
        at = torch.arange(context - rows, context)
        self._step = StepBatch(
            extend=rows > 1,
            q_lens=[rows] * batch,
            kv_lens=[context] * batch,
            page_table=order,
            slots=torch.arange(batch),
            token_pages=order[:, at // PAGE_SIZE].flatten().long(),
            token_offsets=(at % PAGE_SIZE).repeat(batch),
        )
        kernel = make_latent_kernel(self.pool)
        assert kernel is not None, "no C kernel here"
        self._kernel = kernel
        self._q = torch.randn(batch * rows, heads, RANK + TURNED).bfloat16()
        self._new = torch.randn(batch * rows, spec.head_dim).bfloat16()
        queries = torch.randn(batch * rows, INDEX_HEADS, INDEX.index).bfloat16()
        self._chooser = TokenChooser(queries, torch.randn(batch * rows, INDEX_HEADS), CHOSEN)
        up = torch.randn(heads, PLAIN + VALUES, RANK).bfloat16() * 0.05
        self._keys = HeadProducts([matrix.t() for matrix in up[:, :PLAIN]])
        self._values = HeadProducts(list(up[:, PLAIN:]))
        self._expand = Linear(up.flatten(0, 1))

    def decode(self) -> None:
        self._kernel.begin(self._step)
        for layer in range(self.pool.num_layers):
            self._kernel.attend(layer, self._q, self._new, scale=SCALE)

    def sparse(self) -> None:
        backend = SparseLatents(self.pool, self._kernel)
        backend.begin(self._step)
        for layer in range(self.pool.num_layers):
            backend.attend(layer, NewLatents(self._q, self._new, SCALE, self._chooser))

    def absorbed(self) -> None:
        self._kernel.begin(self._step)
        for layer in range(self.pool.num_layers):
            q = torch.cat((self._keys(self._q[:, :, :PLAIN]), self._q[:, :, RANK:]), 2)
            sums = self._kernel.attend(layer, q, self._new, scale=SCALE)
            self._values(sums.view(len(q), -1, RANK))

    def expanded(self) -> None:
        step = self._step
        rows, context = step.q_lens[0], step.kv_lens[0]
        q = self._q[:, :, : PLAIN + TURNED].transpose(0, 1)
        mask = torch.ones(rows, context, dtype=torch.bool).tril(context - rows)
        for layer in range(self.pool.num_layers):
            latents = self.pool.k(layer)[step.page_table[0].long()].flatten(0, 2)[:context]
            both = self._expand(latents[:, :RANK].contiguous()).view(context, -1, PLAIN + VALUES).transpose(0, 1)
            keys = torch.cat((both[:, :, :PLAIN], latents[:, RANK:].expand(len(both), -1, -1)), 2)
            values = pad(both[:, :, PLAIN:], (0, TURNED))  # of K's size torch has a fast kernel
            scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask, scale=SCALE)

    def sum(self) -> None:
        self.pool.buffer.view(torch.int64).sum()


def seconds_of(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """CPU time of the process for each thread: the least of the rounds, the ways in turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.process_time()
            way()
            found[name].append((time.process_time() - begin) / torch.get_num_threads())
    return {name: min(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("heads", 16), ("context", 4096), ("layers", 8), ("rounds", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    decode = []
    for batch in (1, 4, 16):
        made = Layers(heads=args.heads, rows=1, context=args.context, batch=batch, layers=args.layers)
        took = seconds_of({"step": made.decode, "sum": made.sum}, args.rounds)
        size = batch * args.context * SPEC.bytes_per_token() * args.layers
        decode.append(
            [
                str(batch),
                f"{size / 1e6:.0f}",
                *(f"{took[name] * 1e3:.1f}" for name in took),
                f"{size / took['step'] / 1e9:.1f}",
                f"{took['step'] / took['sum']:.2f}",
            ]
        )
    print(table(["requests", "MB", "attention, ms", "sum, ms", "GB/s", "times the sum"], decode))
    prompts = []
    with torch.inference_mode():
        for rows, context in CHUNKS:
            made = Layers(heads=args.heads, rows=rows, context=context, batch=1, layers=1)
            took = seconds_of({"absorbed": made.absorbed, "expanded": made.expanded}, args.rounds)
            prompts.append(
                [
                    f"{rows} of {context}",
                    *(f"{took[name] * 1e3:.0f}" for name in took),
                    f"{took['absorbed'] / took['expanded']:.2f}",
                ]
            )
    print(table(["rows of context", "absorbed, ms a layer", "expanded, ms a layer", "ratio"], prompts))
    indexed = []
    for context in CONTEXTS:
        made = Layers(heads=args.heads, rows=1, context=context, batch=1, layers=2, spec=INDEX)
        took = seconds_of({"dense": made.decode, "sparse": made.sparse}, args.rounds)
        shown = [f"{seconds * 1e3 / 2:.2f}" for seconds in took.values()]
        indexed.append([str(context), *shown, f"{took['dense'] / took['sparse']:.2f}"])
    print(table(["context", "dense, ms a layer", f"{CHOSEN} chosen, ms a layer", "times faster"], indexed))


if __name__ == "__main__":
    main()
