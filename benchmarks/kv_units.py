"""What units of a page cost where they are read: decode attention on CPU over pages of 1, 2, 4 and 8 units, in turns.

usage: python -m benchmarks.kv_units [--tokens 6000] [--layers 28] [--rounds 5] [--threads 1]

One long request, whose pages are scattered over a pool larger than the caches: 8 kv heads of 128, 2 query heads of each.
"""

import argparse
import time
from statistics import median

import torch

from deploy.bench.report import table
from engine.kernels.paged_decode import PagedDecode, make_paged_decode
from engine.kernels.softmax import plain_softmax
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch

UNITS = (1, 2, 4, 8)
PAGE_SIZES = (16, 64)
SPEC = CacheSpec(num_kv_heads=8, head_dim=128, dtype="bfloat16")
GROUP = 2


class Reader:
    """A request of `tokens` tokens in a pool of its own; `read` attends over it once, layer after layer."""

    def __init__(self, units: int, *, page_size: int, tokens: int, layers: int) -> None:
        pages = -(-tokens // page_size)
        self.pool = KVPool([SPEC] * layers, num_pages=pages, page_size=page_size, device="cpu", units=units)
        self.pool.buffer.view(torch.int16).fill_(0x3F80)  # ones: memory that was never written is no memory yet
        kernel = make_paged_decode(self.pool)
        assert kernel is not None, "no C kernel here"
        self._kernel: PagedDecode = kernel
        last = torch.tensor([tokens - 1])
        order = (torch.randperm(pages, generator=torch.Generator().manual_seed(0)) + 1).int()[None]
        self._step = StepBatch(
            extend=False,
            q_lens=[1],
            kv_lens=[tokens],
            page_table=order,
            slots=torch.zeros(1, dtype=torch.int64),
            token_pages=order[0, last // page_size].long(),
            token_offsets=last % page_size,
        )
        self._q = torch.ones(1, GROUP * SPEC.num_kv_heads, SPEC.head_dim, dtype=torch.bfloat16)
        self._new = torch.ones(1, SPEC.num_kv_heads, SPEC.head_dim, dtype=torch.bfloat16)

    def read(self) -> float:
        """Return GB/s."""
        begin = time.perf_counter()
        self._kernel.begin(self._step)
        for layer in range(self.pool.num_layers):
            self._kernel.attend_turned(layer, self._q, self._new, self._new, plain_softmax(SPEC.head_dim))
        return (
            self._step.kv_lens[0] * SPEC.bytes_per_token() * self.pool.num_layers / (time.perf_counter() - begin) / 1e9
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for page_size in PAGE_SIZES:
        readers = {u: Reader(u, page_size=page_size, tokens=args.tokens, layers=args.layers) for u in UNITS}
        found: dict[int, list[float]] = {units: [] for units in UNITS}
        for _ in range(args.rounds):
            for units, reader in readers.items():
                found[units].append(reader.read())
        rows.append([str(page_size), *(f"{median(x):.1f} ({max(x):.1f})" for x in found.values())])
    print(table(["GB/s, median (best); tokens of a page", *(f"units: {units}" for units in UNITS)], rows))


if __name__ == "__main__":
    main()
