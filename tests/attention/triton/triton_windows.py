"""Run by test_triton.py in a process of its own with TRITON_INTERPRET=1: windows, caps and sinks by the Triton backend.

Beside float64, with guard rows around what kernels write, and NaN in every place that a window hides.
"""

import sys
from itertools import pairwise

import numpy as np
import torch

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.attention import triton_backend
from engine.attention.triton_backend import TritonBackend
from engine.kernels.paged_attention import Softmax
from engine.kernels.triton import decode, extend_plan
from engine.kernels.triton import extend as triton_extend
from engine.kv.kv_pool import ONE_UNIT, KVPool, Units
from tests.attention.attention_cases import (
    TOLERANCE,
    Heads,
    Sequence,
    attend,
    by_no_angle,
    fill,
    make_pool,
    make_sequences,
    make_step,
    on_device,
    pages_needed,
    run_step,
    worst_error,
)
from tests.attention.triton.triton_numerics import guarded

HEADS, PAGE = Heads(q=6, kv=2, dim=24), 16
STARTS, ENDS = [0, 0, 140, 320, 129], [1, 44, 170, 330, 130]
SOFTMAXES = {
    "plain": Softmax(0.2),
    "cap": Softmax(0.6, cap=2.0),
    "sinks": Softmax(0.2, sinks=torch.tensor([3.0, -2.0, 0.0, 5.0, -90.0, 1.0])),
    "cap and sinks": Softmax(0.6, cap=2.0, sinks=torch.linspace(-3, 3, 6)),
}


def pool_of(sequences: list[Sequence], starts: list[int], *, window: int) -> KVPool:
    """NaN wherever no row sees a token: before windows, in the new tokens' places, on the scratch page."""
    pool = make_pool(
        HEADS, num_pages=pages_needed([len(s.k) for s in sequences], PAGE), page_size=PAGE, layers=1, window=window
    )
    for cache in (pool.k(0), pool.v(0)):
        cache.fill_(torch.nan)
    fill(pool, sequences, starts, layer=0)
    for s, start in zip(sequences, starts, strict=True):
        at = torch.arange(max(0, start + 1 - window) if window else 0)
        for cache in (pool.k(0), pool.v(0)):
            cache[torch.tensor(s.pages)[at // PAGE], at % PAGE] = torch.nan
    return pool


def check(name: str, *, window: int, alone: int, starts: list[int] = STARTS, extend: bool = True) -> None:
    """Together, and with the bits that number `alone` has alone."""
    softmax = SOFTMAXES[name]
    sequences = make_sequences(HEADS, ENDS, page_size=PAGE, dtype="float32")

    def run(chosen: slice) -> list[torch.Tensor]:
        backend = TritonBackend(pool_of(sequences, starts, window=window), num_heads=HEADS.q)
        mine = sequences[chosen], starts[chosen], ENDS[chosen]
        return run_step(backend, *mine, page_size=PAGE, extend=extend, layer=0, softmax=softmax)

    together = run(slice(None))
    worst = worst_error(together, sequences, starts, ENDS, window=window, softmax=softmax)
    assert worst < TOLERANCE["float32"], (name, window, extend, worst)
    assert torch.equal(run(slice(alone, alone + 1))[0], together[alone]), (name, window, extend, alone)
    guarded.check()


def check_prompts() -> None:
    cases = ((0, "cap and sinks"), (1, "sinks"), (40, "cap"), (300, "plain"))
    for number, (window, name) in enumerate(cases):
        check(name, window=window, alone=2 + number % 2)


def check_split_prompts() -> None:
    """Few rows behind a context, or a window, of several spans."""
    for window in (40, 290):
        q_len, kv_len = ENDS[3] - STARTS[3], ENDS[3]
        plan = extend_plan.plan_extend(
            [q_len], [kv_len], extend_plan.ExtendShape(group=3, kv_heads=2, rows=16, block=32, window=window)
        )
        assert len(plan.rounds[0].split) > 5, (window, plan)
    for number, (window, name) in enumerate(((40, "plain"), (290, "cap and sinks"))):
        check(name, window=window, alone=3 - number % 2)


def check_single_tokens() -> None:
    """By splits: windows of a part of one, of several, and longer than the request."""
    starts = [end - 1 for end in ENDS]
    cases = ((0, "cap and sinks"), (1, "sinks"), (20, "plain"), (100, "sinks"), (290, "cap and sinks"))
    for number, (window, name) in enumerate(cases):
        check(name, window=window, alone=2 + number % 2, starts=starts, extend=False)


def check_riders() -> None:
    """A single token beside prompts has the bits of a decode step."""
    sequences, window, softmax = make_sequences(HEADS, ENDS, page_size=PAGE, dtype="float32"), 40, SOFTMAXES["sinks"]
    backend = TritonBackend(pool_of(sequences, STARTS, window=window), num_heads=HEADS.q)
    mixed = run_step(backend, sequences, STARTS, ENDS, page_size=PAGE, layer=0, riders=[4], softmax=softmax)
    assert worst_error(mixed, sequences, STARTS, ENDS, window=window, softmax=softmax) < TOLERANCE["float32"]
    mine = sequences[4:], STARTS[4:], ENDS[4:]
    (alone,) = run_step(backend, *mine, page_size=PAGE, layer=0, extend=False, softmax=softmax)
    assert torch.equal(mixed[4], alone)


def check_layers_of_both_kinds() -> None:
    """One step of a layer that sees all and one of a window."""
    softmax = SOFTMAXES["plain"]
    sequences = make_sequences(HEADS, ENDS, page_size=PAGE, dtype="float32")
    specs = [make_pool(HEADS, num_pages=1, page_size=PAGE, layers=1, window=window).specs[0] for window in (0, 40)]
    for starts in (STARTS, [end - 1 for end in ENDS]):
        pool = KVPool(specs, num_pages=pages_needed(ENDS, PAGE), page_size=PAGE, device="cpu")
        for layer in range(2):
            fill(pool, sequences, starts, layer=layer)
        backend = TritonBackend(pool, num_heads=HEADS.q)
        step = make_step(sequences, starts, ENDS, page_size=PAGE, extend=starts is STARTS)
        backend.begin(step)
        spans = list(pairwise([0, *np.cumsum(step.q_lens).tolist()]))
        for layer, window in ((0, 0), (1, 40), (0, 0)):
            out = attend(backend, layer, *new_rows(sequences, starts), softmax=softmax)
            outs = [out[a:b] for a, b in spans]
            assert worst_error(outs, sequences, starts, ENDS, window=window, softmax=softmax) < TOLERANCE["float32"], (
                layer
            )


def new_rows(sequences: list[Sequence], starts: list[int]) -> list[torch.Tensor]:
    return [
        torch.cat([getattr(s, name)[a:b] for s, a, b in zip(sequences, starts, ENDS, strict=True)]) for name in "qkv"
    ]


def check_lengths_on_the_device() -> None:
    """A captured graph's way, with a padded row: single tokens, and prompts."""
    softmax, window = SOFTMAXES["sinks"], 40
    sequences = make_sequences(HEADS, ENDS, page_size=PAGE, dtype="float32")
    for starts in (STARTS, [end - 1 for end in ENDS]):
        backend = TritonBackend(pool_of(sequences, starts, window=window), num_heads=HEADS.q)
        step = make_step(sequences, starts, ENDS, page_size=PAGE, extend=starts is STARTS)
        backend.begin_on_device(on_device(step))
        rows = [torch.nn.functional.pad(row, (0, 0, 0, 0, 0, 1)) for row in new_rows(sequences, starts)]
        out = backend.attend(0, by_no_angle(*rows, softmax))[:-1]
        outs = list(out.split(list(step.q_lens)))
        assert worst_error(outs, sequences, starts, ENDS, window=window, softmax=softmax) < TOLERANCE["float32"]
    guarded.check()


def written(
    qkv: torch.Tensor,
    _turn: object,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    units: Units,
    **_norm: object,
) -> torch.Tensor:
    """As `rope_write`, of rows by no angle and without a norm. The kernel itself runs in triton_numerics.py: half of this file's time."""
    assert units is ONE_UNIT
    q, k, v = qkv.split([qkv.shape[1] - 2 * HEADS.kv, HEADS.kv, HEADS.kv], 1)
    k_cache[pages, offsets], v_cache[pages, offsets] = k, v
    return q


def check_split_list() -> None:
    """What a window hides is in no split."""
    tiles = decode.DecodeTiles(chunk=16, chunks=4, block=16, per_sm=100)
    kv_lens = torch.tensor([1, 16, 17, 40, 20000], dtype=torch.int32)
    for window, counts in ((1, [1] * 5), (16, [1] * 5), (33, [1, 1, 2, 3, 3]), (100, [1, 1, 2, 3, 4])):
        records = decode.split_list(kv_lens, torch.arange(5), kv_heads=3, tiles=tiles, window=window).records.tolist()
        assert records[-1][0] == sum(counts), (window, records)
        mine = [[record[2:4] for record in records[: sum(counts)] if record[0] == i] for i in range(5)]
        for kv_len, count, spans in zip(kv_lens.tolist(), counts, mine, strict=True):
            assert len(spans) == count and spans[0][0] == max(0, kv_len - window) and spans[-1][1] == kv_len, spans
            assert all(a[1] == b[0] for a, b in pairwise(spans)), spans
    guarded.check()


def main() -> None:
    torch.set_num_threads(1)
    for module in (decode, triton_extend):
        setattr(module, "torch", guarded)  # noqa: B010
    setattr(triton_backend, "rope_write", written)  # noqa: B010
    check_split_list()
    check_prompts()
    check_single_tokens()
    check_riders()
    check_layers_of_both_kinds()
    check_lengths_on_the_device()
    setattr(extend_plan, "MIN_SPAN", 16)  # noqa: B010
    setattr(extend_plan, "MAX_WHOLE", 31)  # noqa: B010
    setattr(extend_plan, "PROGRAMS", 30)  # noqa: B010
    check_split_prompts()


if __name__ == "__main__":
    main()
    sys.exit(0)
