"""Run by test_triton.py in a process of its own with TRITON_INTERPRET=1 (it must be set before kernels are defined).

Each case checks the Triton backend against float64, with guard rows around the output: the interpreter does not
notice a store out of bounds.
"""

import sys

import torch

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.attention import triton_backend
from engine.attention.flashinfer_prompts import FlashInferPrompts
from engine.attention.triton_backend import TritonBackend
from engine.kernels.paged_attention import Softmax
from engine.kernels.tape import limit_sms
from engine.kernels.triton import decode, elementwise, extend_plan
from engine.kernels.triton import extend as triton_extend
from tests.attention.attention_cases import (
    TOLERANCE,
    Heads,
    all_heads,
    by_no_angle,
    fill,
    filled_pool,
    make_pool,
    make_sequences,
    make_step,
    on_device,
    poisoned_pool,
    run_step,
    worst_error,
)
from tests.attention.flashinfer_stand_in import BatchPrefillWithPagedKVCacheWrapper
from tests.attention.triton.triton_checksum import check_checksum
from tests.attention.triton.triton_elementwise import check_elementwise
from tests.attention.triton.triton_trees import check_trees

GUARD = 7  # of any dtype
GUARD_ROWS = 64  # more than any tile: a store too many hits a guard, not the heap


class GuardedTorch:
    """torch, with guard rows around every tensor that a kernel writes to."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        whole = torch.full((GUARD_ROWS + shape[0] + GUARD_ROWS, *shape[1:]), GUARD, dtype=dtype, device=device)
        self.made.append(whole)
        return whole[GUARD_ROWS:-GUARD_ROWS]

    def empty_like(self, x: torch.Tensor) -> torch.Tensor:
        return self.empty(tuple(x.shape), dtype=x.dtype, device=x.device)

    def check(self) -> None:
        assert self.made
        for whole in self.made:
            assert (whole[:GUARD_ROWS] == GUARD).all() and (whole[-GUARD_ROWS:] == GUARD).all()
        self.made.clear()

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


guarded = GuardedTorch()


def check(name: str, heads: Heads, starts: list[int], ends: list[int], *, page_size: int, extend: bool) -> None:
    sequences = make_sequences(heads, ends, page_size=page_size, dtype="float32")
    pool = poisoned_pool(heads, ends, page_size=page_size, dtype="float32")
    fill(pool, sequences, starts)
    outs = run_step(TritonBackend(pool, num_heads=heads.q), sequences, starts, ends, page_size=page_size, extend=extend)
    error = worst_error(outs, sequences, starts, ends)
    assert error < TOLERANCE["float32"], (name, error)
    guarded.check()


def check_lengths_on_the_device() -> None:
    """A captured graph's way: two requests and a padded row, whose table names only page 0, beside them."""
    heads, ends = Heads(q=4, kv=2, dim=16), [300, 40]
    sequences = make_sequences(heads, ends, page_size=16, dtype="float32")
    starts = [n - 1 for n in ends]
    pool = filled_pool(heads, sequences, starts)
    before = pool.buffer[pool.page_bytes :].clone()
    step = make_step(sequences, starts, ends, page_size=16, extend=False)
    backend = TritonBackend(pool, num_heads=heads.q)
    more = torch.nn.functional.pad
    backend.begin_on_device(on_device(step))
    rows = [torch.cat([getattr(s, name)[-1:] for s in sequences]) for name in "qkv"]
    out = backend.attend(1, by_no_angle(*(more(row, (0, 0, 0, 0, 0, 1)) for row in rows)))
    assert worst_error(list(out[:2].split(1)), sequences, starts, ends) < TOLERANCE["float32"]
    pool.write(1, step.token_pages, step.token_offsets, *(torch.zeros_like(row) for row in rows[1:]))
    assert torch.equal(pool.buffer[pool.page_bytes :], before), "a padded row wrote into a request's page"
    guarded.check()


def check_alone_and_together() -> None:
    heads, ends = Heads(q=2, kv=1, dim=16), [300, 40]
    sequences = make_sequences(heads, ends, page_size=16, dtype="float32")
    starts = [n - 1 for n in ends]
    pool = filled_pool(heads, sequences, starts)
    together = run_step(TritonBackend(pool, num_heads=heads.q), sequences, starts, ends, page_size=16, extend=False)
    alone = run_step(
        TritonBackend(pool, num_heads=heads.q), sequences[1:], starts[1:], ends[1:], page_size=16, extend=False
    )
    assert torch.equal(together[1], alone[0])


def check_split_extend() -> None:
    """Few rows behind a context of several spans, beside a whole prompt and single tokens; a span ends inside a tile."""
    setattr(extend_plan, "MIN_SPAN", 16)  # noqa: B010
    setattr(extend_plan, "MAX_WHOLE", 31)  # noqa: B010
    setattr(extend_plan, "MAX_PARTS", 100)  # noqa: B010
    starts, ends = [91, 0, 64, 32], [104, 6, 65, 33]
    check("extend, split", Heads(q=4, kv=2, dim=16), starts, ends, page_size=16, extend=True)
    heads = Heads(q=3, kv=1, dim=24)
    plan = extend_plan.plan_extend([13, 6, 1, 1], ends, extend_plan.ExtendShape(group=3, kv_heads=1, rows=16, block=32))
    flat = [x for now in plan.rounds for x in now.split]
    assert set(plan.whole[::2]) == {1} and set(flat[::5]) == {0, 2, 3} and len(plan.rounds) > 1, plan
    assert [96 - 32, 96] in [flat[i + 2 : i + 4] for i in range(0, len(flat), 5)], "tokens 95 and 96 share a tile"
    sequences = make_sequences(heads, ends, page_size=16, dtype="float32")
    pool = filled_pool(heads, sequences, starts)
    backend = TritonBackend(pool, num_heads=heads.q)
    together = run_step(backend, sequences, starts, ends, page_size=16)
    assert worst_error(together, sequences, starts, ends) < TOLERANCE["float32"]
    alone = run_step(backend, sequences[2:], starts[2:], ends[2:], page_size=16)
    assert all(torch.equal(a, b) for a, b in zip(alone, together[2:], strict=True))
    sequences[0].v[10, 0, 0] = sequences[2].k[50, 0, 0] = torch.nan
    fill(pool, sequences, starts)
    outs = run_step(backend, sequences, starts, ends, page_size=16)
    assert [bool(out.isnan().any()) for out in outs] == [True, False, True, False]
    guarded.check()


def check_units() -> None:
    """Of a page with several units: the bits of one with one, of decodes, prompts, and few rows behind a long context."""
    heads, starts, ends = Heads(q=8, kv=4, dim=16), [0, 76, 64, 299], [20, 77, 66, 300]
    sequences = make_sequences(heads, ends, page_size=16, dtype="float32")
    for chosen, extend in ((slice(0, 4), True), (slice(1, 4, 2), False)):
        mine = sequences[chosen], starts[chosen], ends[chosen]
        outs, kept = [], []
        for units in (1, 2, 4):
            pool = filled_pool(heads, sequences, starts, units=units)
            backend = TritonBackend(pool, num_heads=heads.q)
            outs.append(torch.cat(run_step(backend, *mine, page_size=16, extend=extend)))
            kept.append(all_heads(pool, 1))
        assert all(torch.equal(out, outs[0]) for out in outs), extend
        assert worst_error(list(outs[0].split([b - a for a, b in zip(*mine[1:], strict=True)])), *mine) < 2e-5
        assert all(torch.equal(each, kept[0]) for each in kept), extend
    guarded.check()


def check_riders() -> None:
    """Single tokens beside prompts have the bits of a decode step, and disturb none."""
    heads, starts, ends = Heads(q=4, kv=2, dim=16), [0, 76, 16, 299], [20, 77, 30, 300]
    sequences = make_sequences(heads, ends, page_size=16, dtype="float32")
    pool = filled_pool(heads, sequences, starts)
    backend = TritonBackend(pool, num_heads=heads.q)
    mixed = run_step(backend, sequences, starts, ends, page_size=16, riders=[1, 3])
    assert worst_error(mixed, sequences, starts, ends) < TOLERANCE["float32"]
    chosen = [of[1::2] for of in (sequences, starts, ends)]
    alone = run_step(backend, *chosen, page_size=16, extend=False)
    assert all(torch.equal(a, b) for a, b in zip(alone, mixed[1::2], strict=True))
    guarded.check()


def check_library() -> None:
    """A long prompt by FlashInfer's arguments, beside a split one and a short one by Triton; then a step of its alone."""
    setattr(extend_plan, "PROGRAMS", 2)  # noqa: B010
    heads, starts, ends = Heads(q=2, kv=1, dim=16), [0, 64, 0], [48, 66, 20]
    q_lens = [b - a for a, b in zip(starts, ends, strict=True)]
    plan = extend_plan.plan_extend(
        q_lens, ends, extend_plan.ExtendShape(group=2, kv_heads=1, rows=16, block=32), has_library=True
    )
    assert plan.library == [0] and set(plan.rounds[0].split[::5]) == {1} and set(plan.whole[::2]) == {2}, plan
    sequences = make_sequences(heads, ends, page_size=16, dtype="float32")
    pool = filled_pool(heads, sequences, starts)
    prompts = FlashInferPrompts(pool, num_heads=heads.q, wrapper=BatchPrefillWithPagedKVCacheWrapper)
    backend = TritonBackend(pool, num_heads=heads.q, prompts=prompts)
    for chosen in (slice(0, 3), slice(0, 1), slice(1, 3)):
        mine = sequences[chosen], starts[chosen], ends[chosen]
        assert worst_error(run_step(backend, *mine, page_size=16), *mine) < TOLERANCE["float32"], chosen
    guarded.check()


def programs_are(number: int) -> None:
    setattr(decode, "INTERPRETED_PROGRAMS", number)  # noqa: B010
    decode._multiprocessors_of.cache_clear()


def check_split_list() -> None:
    """More requests than a program reads at a time: of few programs whole requests, of many single chunks."""
    tiles = decode.DecodeTiles(chunk=16, chunks=8, block=16, per_sm=1)
    kv_lens = [1, 16, 17, 40, 200, 3, 64, 65, 33]
    sizes = [16] * 4 + [32] + [16] * 4  # of a chunk: eight of 16 tokens are too few for 200
    counts = [1, 1, 2, 3, 7, 1, 4, 5, 3]
    setattr(decode, "LIST_TILE", 4)  # noqa: B010
    for programs, runs in ((18, [1, 1, 2, 3, 3, 1, 4, 5, 3]), (300, [1] * 9)):
        lens, slots = torch.tensor(kv_lens, dtype=torch.int32), torch.arange(9) + 20
        with limit_sms(programs):  # as on a lane of PD multiplexing
            splits = decode.split_list(lens, slots, kv_heads=3, tiles=tiles)
        expected, parts = [], 0
        for i, (kv_len, size, count, run) in enumerate(zip(kv_lens, sizes, counts, runs, strict=True)):
            mine = count - run + 1 if run < count else 0
            for first in range(0, count, run):
                span = [first * size, min((first + run) * size, kv_len)]
                expected.append([i, 20 + i, *span, size, parts + max(0, first - run + 1), parts, mine])
            parts += mine
        found = splits.records.tolist()
        assert found[: len(expected)] == expected and found[-1][0] == len(expected), found
        assert not splits.done.any() and parts <= splits.parts
    guarded.check()


def check_merge() -> None:
    """The last split of a request is followed by one merge, in any order of programs: parts of all splits are there."""
    tiles = decode.DecodeTiles(chunk=16, chunks=16, block=16, per_sm=1)
    heads, kv_lens = Heads(q=6, kv=2, dim=24), [70, 40, 17, 1, 16, 100]
    pool = make_pool(heads, num_pages=20, page_size=16)
    pool.buffer.view(torch.float32).normal_(generator=torch.Generator().manual_seed(1))
    q = torch.randn(6, heads.q, heads.dim, generator=torch.Generator().manual_seed(2))
    table = torch.arange(6 * 20, dtype=torch.int32).view(6, 20) % 20 + 1
    programs_are(1000)
    splits = decode.split_list(
        torch.tensor(kv_lens, dtype=torch.int32), torch.arange(6), kv_heads=heads.kv, tiles=tiles
    )
    merged = [request * heads.kv + i for request in (0, 1, 2, 5) for i in range(heads.kv)]
    outs = []
    for programs in (3, 100):  # the last are more than there are splits
        for layer in range(2):
            pages = decode.PagedLayer(pool.k(layer), pool.v(layer), table, Softmax(q.shape[2] ** -0.5))
            with limit_sms(programs):
                outs.append(decode.decode(q, pages, splits=splits, tiles=tiles))
            assert not splits.done.any(), "the next layer would count on"
            merges = guarded.made[-1][GUARD_ROWS:-GUARD_ROWS]
            noted = [x for x in merges.tolist() if x != GUARD]
            requests = splits.records[:, 0].tolist()
            assert sorted(requests[x // heads.kv] * heads.kv + x % heads.kv for x in noted) == merged
    assert all(torch.equal(out, outs[i % 2]) for i, out in enumerate(outs))
    programs_are(3)
    guarded.check()


def main() -> None:
    torch.set_num_threads(1)
    for module in (decode, triton_extend, elementwise):
        setattr(module, "torch", guarded)  # noqa: B010
    assert triton_backend.decode is decode.decode
    mqa, gqa, odd = Heads(q=3, kv=1, dim=16), Heads(q=4, kv=2, dim=32), Heads(q=2, kv=1, dim=24)
    for page_size in (1, 16):
        check("decode", gqa, [0, 14, 15, 63, 64], [1, 15, 16, 64, 65], page_size=page_size, extend=False)
        check("decode, splits", mqa, [127, 299, 128], [128, 300, 129], page_size=page_size, extend=False)
        check("extend", gqa, [0, 16, 5], [20, 17, 40], page_size=page_size, extend=True)
    check("decode, dim", odd, [20], [21], page_size=16, extend=False)
    check("extend, dim", odd, [3], [21], page_size=16, extend=True)
    check("extend, tiles", mqa, [0, 70], [70, 140], page_size=16, extend=True)
    check_split_extend()
    check_library()
    check_riders()
    check_units()
    check_split_list()
    check_merge()
    check_alone_and_together()
    check_lengths_on_the_device()
    check_elementwise(guarded.check)
    check_checksum()
    check_trees(guarded.check)
    # longer than all chunks of the least size: chunks grow
    few = decode.DecodeTiles(chunks=2)
    setattr(triton_backend, "decode_tiles", lambda **_: few)  # noqa: B010
    check("decode, long chunks", mqa, [419, 9], [420, 10], page_size=16, extend=False)


if __name__ == "__main__":
    main()
    sys.exit(0)
