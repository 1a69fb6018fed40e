"""Run by test_triton.py with TRITON_INTERPRET=1: KV of 8 bits by the Triton backend has the bits of KV that holds the same values."""

import sys
from collections.abc import Callable
from dataclasses import replace

import torch

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.attention.triton_backend import TritonBackend, TritonLatents
from engine.kernels.paged_attention import Softmax
from engine.kernels.triton import extend_plan
from engine.kv.cache_spec import CacheSpec
from engine.kv.fp8 import dequantized, quantized
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import DeviceExtend, DeviceStep, StepBatch
from engine.layers.latents import NewLatents
from engine.layers.rope import Unturned
from tests.attention.attention_cases import (
    Heads,
    Sequence,
    by_no_angle,
    fill,
    latents_by_no_angle,
    make_pool,
    make_sequences,
    make_step,
    on_device,
    pages_needed,
)
from tests.attention.test_latents import SCALE, Shape
from tests.attention.tree_cases import Tree, chain, fill_known, new_rows, pages_of, tree_requests, tree_step

PAGE = 16
STARTS, ENDS = [0, 76, 16, 199, 8], [20, 77, 30, 200, 10]
WORDS, ODD = Heads(q=8, kv=4, dim=16), Heads(q=6, kv=2, dim=24)  # exponents of a token fill words, or do not
SINKS = Softmax(0.6, cap=2.0, sinks=torch.linspace(-3, 3, 6))

Pools = Callable[[bool], KVPool]  # codes, or float32 of the same values
Step = StepBatch | DeviceStep | DeviceExtend


def pools_of(heads: Heads, pages: int, *, units: int = 1, window: int = 0) -> Pools:
    """NaN wherever nothing is written, but of padded rows."""

    def make(fp8: bool) -> KVPool:
        pool = make_pool(
            heads, num_pages=pages, page_size=PAGE, layers=1, window=window, units=1 if not fp8 else units, fp8=fp8
        )
        pool.buffer[pool.page_bytes :].fill_(0xFF)
        return pool

    return make


def as_kept(sequences: list[Sequence]) -> list[Sequence]:
    """K and V are values that codes hold."""
    return [
        replace(s, **{name: dequantized(*quantized(getattr(s, name)), s.k.dtype) for name in "kv"}) for s in sequences
    ]


def attended(backend: TritonBackend, step: Step, new: Unturned | NewLatents) -> torch.Tensor:
    if isinstance(step, StepBatch):
        backend.begin(step)
    else:
        backend.begin_on_device(step)
    return backend.attend(0, new)  # type: ignore[arg-type]


def rows_of(sequences: list[Sequence], starts: list[int], *, more: int) -> list[torch.Tensor]:
    rows = (torch.cat([getattr(s, n)[a:b] for s, a, b in zip(sequences, starts, ENDS, strict=True)]) for n in "qkv")
    return [torch.nn.functional.pad(row, (0, 0, 0, 0, 0, more)) for row in rows]


def check(heads: Heads, softmax: Softmax | None = None, *, units: int = 1, window: int = 0) -> None:
    """Prompts, their rest, and single tokens beside them and alone, also of lengths on the device: results, and what is kept."""
    sequences = as_kept(make_sequences(heads, ENDS, page_size=PAGE, dtype="float32"))
    pools = pools_of(heads, pages_needed(ENDS, PAGE), units=units, window=window)
    right = pools(True)
    fill(right, sequences, ENDS, layer=0)
    for starts, device in ((STARTS, False), (STARTS, True), ([end - 1 for end in ENDS], False)):
        step = make_step(sequences, starts, ENDS, page_size=PAGE, extend=starts is STARTS)
        outs = []
        for fp8 in (True, False):
            pool = pools(fp8)
            fill(pool, sequences, starts, layer=0)
            new = by_no_angle(*rows_of(sequences, starts, more=int(device)), softmax)
            mine = on_device(step) if device else replace(step, riders=[1, 3] if step.extend else None)
            backend = TritonBackend(pool, num_heads=heads.q)
            outs.append(attended(backend, mine, new)[: sum(step.q_lens)])
            if fp8:
                assert torch.equal(pool.buffer[pool.page_bytes :], right.buffer[pool.page_bytes :]), "other bytes"
        assert not outs[0].isnan().any() and torch.equal(*outs), (heads, units, window, starts, device)


def check_bytes(heads: Heads, units: int) -> None:
    """Rows of any size, of zeros, and those that are not finite: as torch writes them."""
    sequences = make_sequences(heads, ENDS, page_size=PAGE, dtype="bfloat16")
    for scale, s in zip((1.0, 1e-30, 1e30, 3e38, 1e-45), sequences, strict=True):
        s.k.mul_(scale)
        s.v[:, 1].mul_(scale)
    sequences[0].v[7] = 0.0
    sequences[2].v[17, 0, 7], sequences[2].k[18, 1, 3] = torch.nan, torch.inf
    pools = [
        make_pool(heads, num_pages=pages_needed(ENDS, PAGE), page_size=PAGE, dtype="bfloat16", units=units, fp8=True)
        for _ in range(2)
    ]
    step = make_step(sequences, STARTS, ENDS, page_size=PAGE, extend=True)
    rows = rows_of(sequences, STARTS, more=0)
    _, *kept = by_no_angle(*rows).turned()
    backend = TritonBackend(pools[0], num_heads=heads.q)
    attended(backend, step, by_no_angle(*rows))
    pools[1].write(0, step.token_pages, step.token_offsets, *kept)
    assert torch.equal(pools[0].buffer, pools[1].buffer)


def check_trees() -> None:
    trees = [Tree(30, [0, 0, 1, 2, 3], [30, 34, 32, 33, 31], 31), chain(15, 2)]
    requests = as_kept(tree_requests(WORDS, trees, page_size=PAGE, dtype="float32"))
    step, outs = tree_step(trees, requests, page_size=PAGE), []
    for fp8 in (True, False):
        pool = pools_of(WORDS, pages_of(requests))(fp8)
        fill_known(pool, trees, requests)
        outs.append(attended(TritonBackend(pool, num_heads=8), step, by_no_angle(*new_rows(trees, requests))))
    assert not outs[0].isnan().any() and torch.equal(*outs)


def check_latents(shape: Shape) -> None:
    """New latents are signs, so that their norm is themselves."""
    sequences = make_sequences(Heads(shape.heads, 1, shape.width), ENDS, page_size=PAGE, dtype="float32")
    for s, start in zip(sequences, STARTS, strict=True):
        s.k[start:, :, : shape.rank].sign_()
    sequences = as_kept(sequences)
    for starts in (STARTS, [end - 1 for end in ENDS]):
        step, outs = make_step(sequences, starts, ENDS, page_size=PAGE, extend=starts is STARTS), []
        q, k, _ = rows_of(sequences, starts, more=0)
        for fp8 in (True, False):
            spec = CacheSpec(1, shape.width, "float32", latent=shape.rank, fp8=fp8)
            pool = KVPool([spec], num_pages=pages_needed(ENDS, PAGE), page_size=PAGE, device="cpu")
            pool.buffer.fill_(0xFF)
            right = pool.buffer.clone()
            fill(pool, sequences, starts, layer=0)
            new = latents_by_no_angle(q, k[:, 0], rank=shape.rank, scale=SCALE)
            outs.append(attended(TritonLatents(pool, num_heads=shape.heads), step, new))
            kept = pool.buffer.clone()
            pool.buffer.copy_(right)
            fill(pool, sequences, ENDS, layer=0)
            assert torch.equal(kept, pool.buffer), "other bytes"
        assert not outs[0].isnan().any() and torch.equal(*outs), (shape, starts)


def main() -> None:
    torch.set_num_threads(1)
    for heads, units in ((WORDS, 1), (WORDS, 2), (ODD, 1)):
        check_bytes(heads, units)
    check(WORDS)
    check(WORDS, units=2)
    check(ODD, SINKS, window=40)
    check(ODD, SINKS)
    check_trees()
    for shape in (Shape(5, 80, 48), Shape(3, 576, 512)):
        check_latents(shape)
    setattr(extend_plan, "MIN_SPAN", 16)  # noqa: B010
    setattr(extend_plan, "MAX_WHOLE", 31)  # noqa: B010
    setattr(extend_plan, "PROGRAMS", 40)  # noqa: B010
    check(WORDS)
    check_latents(Shape(5, 80, 48))


if __name__ == "__main__":
    main()
    sys.exit(0)
