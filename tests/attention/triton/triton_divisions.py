"""Run by test_triton.py in a process of its own with TRITON_INTERPRET=1: any division of a decode step gives the same bits."""

import math
import random
import sys
from collections.abc import Callable

import torch

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.attention import triton_backend
from engine.attention.triton_backend import TritonBackend
from engine.kernels.paged_attention import Softmax
from engine.kernels.triton.decode import DecodeTiles, SplitList
from tests.attention.attention_cases import TOLERANCE, make_sequences, run_step, worst_error
from tests.attention.test_latents import PAGE, Shape, latent_sequences
from tests.attention.tree_cases import fill_known, new_rows, pages_of, tree_requests, tree_step
from tests.attention.triton import triton_latents, triton_trees, triton_windows

TILES = DecodeTiles(chunk=32, chunks=8, block=16)  # two or three blocks a chunk
CASES = ((0, "plain"), (100, "cap and sinks"))

Outs = list[torch.Tensor]


def firsts_of(chunks: int, share: float, rng: random.Random) -> list[int]:
    """First chunks of splits, of about that share of all chunks."""
    return [0, *(chunk for chunk in range(1, chunks) if rng.random() < share)]


def divided(share: float) -> Callable[..., SplitList]:
    """In place of `split_list`: splits of any runs of chunks, in any order."""
    rng = random.Random(share)

    def divide(
        kv_lens: torch.Tensor, slots: torch.Tensor, *, kv_heads: int, tiles: DecodeTiles, window: int = 0
    ) -> SplitList:
        records, parts = [], 0
        for request, (kv_len, slot) in enumerate(zip(kv_lens.tolist(), slots.tolist(), strict=True)):
            low = max(0, kv_len - window) if window else 0
            chunk = max(tiles.chunk, math.ceil((kv_len - low) / tiles.chunks / tiles.block) * tiles.block)
            count = math.ceil((kv_len - low) / chunk)
            firsts = firsts_of(count, share, rng)
            run = [*firsts, count][1]
            mine = count - run + 1 if len(firsts) > 1 else 0
            for first, end in zip(firsts, [*firsts[1:], count], strict=True):
                span = (low + first * chunk, min(low + end * chunk, kv_len))
                records.append([request, slot, *span, chunk, parts + max(0, first - run + 1), parts, mine])
            parts += mine
        rng.shuffle(records)
        size = len(kv_lens) * tiles.chunks
        table = torch.zeros(size + 1, 8, dtype=torch.int32)
        table[: len(records)] = torch.tensor(records)
        table[size, 0] = len(records)
        return SplitList(table, torch.zeros(len(kv_lens), kv_heads, dtype=torch.int32), max(parts, 1))

    return divide


def check(name: object, run: Callable[[], Outs]) -> None:
    """Single chunks, and any runs; beside the engine's own division."""
    expected = run()
    for share in (1.0, 0.4):
        engines = triton_backend.split_list
        setattr(triton_backend, "split_list", divided(share))  # noqa: B010
        outs = run()
        setattr(triton_backend, "split_list", engines)  # noqa: B010
        same = [torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(outs, expected, strict=True)]
        assert all(same), (name, share, same)


def check_softmaxes() -> None:
    heads, page, ends = triton_windows.HEADS, triton_windows.PAGE, [330, 130, 1]
    starts, sequences = [end - 1 for end in ends], make_sequences(heads, ends, page_size=page, dtype="float32")
    for window, name in CASES:
        softmax = triton_windows.SOFTMAXES[name]
        backend = TritonBackend(triton_windows.pool_of(sequences, starts, window=window), num_heads=heads.q)

        def run(backend: TritonBackend = backend, softmax: Softmax = softmax, window: int = window) -> Outs:
            outs = run_step(backend, sequences, starts, ends, page_size=page, extend=False, layer=0, softmax=softmax)
            assert worst_error(outs, sequences, starts, ends, window=window, softmax=softmax) < TOLERANCE["float32"]
            return outs

        check((window, name), run)


def check_latents() -> None:
    shape = Shape(5, 80, 48)
    sequences = latent_sequences(shape, triton_latents.ENDS, "float32")
    check("latents", lambda: triton_latents.run(shape, sequences, triton_latents.SINGLE, slice(2, 6)))


def check_trees() -> None:
    trees, heads = triton_trees.few_trees(), triton_trees.HEADS
    requests = tree_requests(heads, trees, page_size=PAGE, dtype="float32")
    pool = triton_trees.pool_of(pages_of(requests), units=2)
    fill_known(pool, trees, requests)
    step, rows = tree_step(trees, requests, page_size=PAGE), new_rows(trees, requests)
    check("trees", lambda: [triton_trees.attended(pool, step, rows, Softmax(0.2))])


def main() -> None:
    torch.set_num_threads(1)
    setattr(triton_backend, "decode_tiles", lambda **_: TILES)  # noqa: B010
    setattr(triton_backend, "latent_decode_tiles", lambda **_: TILES)  # noqa: B010
    check_latents()
    check_trees()
    setattr(triton_backend, "rope_write", triton_windows.written)  # noqa: B010
    check_softmaxes()


if __name__ == "__main__":
    main()
    sys.exit(0)
