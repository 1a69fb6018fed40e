"""Run by test_triton.py in a process of its own with TRITON_INTERPRET=1: latent attention (MLA) by the Triton backend.

Beside float64, with guard rows around what kernels write, and NaN in every place that holds no token before the step's.
"""

import sys
from dataclasses import replace

import torch

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.attention.triton_backend import TritonLatents
from engine.kernels.triton import decode, extend, extend_plan
from engine.kv.kv_pool import KVPool
from engine.layers.latents import NewLatents
from tests.attention.attention_cases import TOLERANCE, Sequence, latents_by_no_angle, make_step, on_device, pages_needed
from tests.attention.test_latents import PAGE, SCALE, Shape, latent_pool, latent_reference, latent_sequences
from tests.attention.triton.triton_numerics import guarded

STARTS, ENDS = [0, 76, 40, 299, 0, 130], [50, 77, 90, 300, 1, 140]
SINGLE = [end - 1 for end in ENDS]


def pool_of(shape: Shape, sequences: list[Sequence], starts: list[int]) -> KVPool:
    pool = latent_pool(shape, "float32", num_pages=pages_needed(ENDS, PAGE))
    for layer in range(2):
        pool.k(layer).fill_(torch.nan)
    for s, start in zip(sequences, starts, strict=True):
        at = torch.arange(start)
        pool.write(1, torch.tensor(s.pages)[at // PAGE] if start else at, at % PAGE, s.k[:start], s.k[:start])
    return pool


def new_latents(
    shape: Shape, sequences: list[Sequence], starts: list[int], ends: list[int], *, more: int = 0
) -> NewLatents:
    """`more`: padded rows."""
    q, latents = (
        torch.cat([rows[a:b] for rows, a, b in zip(kept, starts, ends, strict=True)])
        for kept in ([s.q for s in sequences], [s.k[:, 0] for s in sequences])
    )
    pad = torch.nn.functional.pad
    return latents_by_no_angle(
        pad(q, (0, 0, 0, 0, 0, more)), pad(latents, (0, 0, 0, more)), rank=shape.rank, scale=SCALE
    )


def check_near(
    outs: list[torch.Tensor], shape: Shape, sequences: list[Sequence], starts: list[int], ends: list[int]
) -> None:
    for out, s, start, end in zip(outs, sequences, starts, ends, strict=True):
        assert (out.double() - latent_reference(shape, s, start, end)).abs().max() < TOLERANCE["float32"], (
            shape,
            start,
            end,
        )


def run(
    shape: Shape,
    sequences: list[Sequence],
    starts: list[int],
    chosen: slice = slice(None),
    *,
    riders: list[int] | None = None,
) -> list[torch.Tensor]:
    """Beside float64: of each request."""
    backend = TritonLatents(pool_of(shape, sequences, starts), num_heads=shape.heads)
    mine, begins, ends = sequences[chosen], starts[chosen], ENDS[chosen]
    step = make_step(mine, begins, ends, page_size=PAGE, extend=starts is not SINGLE)
    backend.begin(replace(step, riders=riders))
    outs = list(backend.attend(1, new_latents(shape, mine, begins, ends)).split(list(step.q_lens)))
    check_near(outs, shape, mine, begins, ends)
    return outs


def check_steps(shape: Shape) -> None:
    """Prompts, the rest of prompts, and single tokens: together, and with the bits of each alone."""
    sequences = latent_sequences(shape, ENDS, "float32")
    for starts in (STARTS, SINGLE):
        together = run(shape, sequences, starts)
        for i in (2, 3):
            assert torch.equal(run(shape, sequences, starts, slice(i, i + 1))[0], together[i]), (shape, i)
    guarded.check()


def check_riders(shape: Shape) -> None:
    sequences = latent_sequences(shape, ENDS, "float32")
    mixed = run(shape, sequences, STARTS, riders=[1, 3])
    single = run(shape, sequences, SINGLE)
    assert torch.equal(mixed[1], single[1]) and torch.equal(mixed[3], single[3])


def check_lengths_on_the_device(shape: Shape) -> None:
    """A captured graph's way, with a padded row: single tokens, and prompts."""
    sequences = latent_sequences(shape, ENDS, "float32")
    for starts in (STARTS, SINGLE):
        backend = TritonLatents(pool_of(shape, sequences, starts), num_heads=shape.heads)
        step = make_step(sequences, starts, ENDS, page_size=PAGE, extend=starts is not SINGLE)
        backend.begin_on_device(on_device(step))
        outs = backend.attend(1, new_latents(shape, sequences, starts, ENDS, more=1))[:-1].split(list(step.q_lens))
        check_near(list(outs), shape, sequences, starts, ENDS)
    guarded.check()


def check_split_prompts(shape: Shape) -> None:
    """Few rows behind a context of several spans."""
    plan = extend_plan.plan_extend(
        [10], [140], extend_plan.ExtendShape(group=shape.heads, kv_heads=1, rows=16, block=16, pairs=True)
    )
    assert len(plan.rounds[0].merges) >= 8 and plan.rounds[0].merges[3] > 1, plan
    check_steps(shape)


def main() -> None:
    torch.set_num_threads(1)
    assert [decode.head_tiles(n) for n in (1, 5, 16, 20, 33, 128)] == [1, 1, 1, 2, 3, 8]
    for module in (decode, extend):
        setattr(module, "torch", guarded)  # noqa: B010
    odd, many, real = Shape(5, 80, 48), Shape(33, 96, 80), Shape(3, 576, 512)
    check_steps(odd)
    check_steps(real)
    check_riders(odd)
    check_lengths_on_the_device(odd)
    single = latent_sequences(many, ENDS, "float32")
    run(many, single, SINGLE)
    setattr(extend_plan, "MIN_SPAN", 16)  # noqa: B010
    setattr(extend_plan, "MAX_WHOLE", 31)  # noqa: B010
    setattr(extend_plan, "PROGRAMS", 40)  # noqa: B010
    check_split_prompts(odd)


if __name__ == "__main__":
    main()
    sys.exit(0)
