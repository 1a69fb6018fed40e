"""Latent attention: one vector of a token is K of all heads and, in its first elements, V."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from engine.attention.backend import make_attention_backend
from engine.attention.latent import CpuLatents, SparseLatents, TorchLatents
from engine.attention.triton_backend import TritonLatents
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from service.flags import ConfigError
from tests.attention.attention_cases import (
    TOLERANCE,
    Heads,
    Sequence,
    latents_by_no_angle,
    make_sequences,
    make_step,
    pages_needed,
)

PAGE = 16


@dataclass(frozen=True)
class Shape:
    heads: int
    width: int
    rank: int


SHAPES = [Shape(1, 16, 16), Shape(4, 48, 32), Shape(5, 80, 48), Shape(16, 576, 512), Shape(33, 96, 80)]
SCALE = 0.11


def test_the_backend_without_latents_is_refused() -> None:
    pool = latent_pool(Shape(4, 48, 32), "bfloat16", num_pages=1)
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer: has no latent attention.*; choose triton"):
        make_attention_backend("flashinfer", pool, num_heads=4)


def test_triton_is_chosen_on_devices_other_than_a_cpu_unless_there_is_an_index() -> None:
    spec = CacheSpec(num_kv_heads=1, head_dim=48, dtype="bfloat16", latent=32)
    pool, indexed = (
        KVPool([each], num_pages=1, page_size=PAGE, device="meta") for each in (spec, replace(spec, index=8))
    )
    assert isinstance(make_attention_backend("auto", pool, num_heads=4), TritonLatents)
    assert isinstance(make_attention_backend("auto", indexed, num_heads=4), SparseLatents)
    with pytest.raises(ConfigError, match=r"--attention-backend triton: has no index of latents.*; choose torch"):
        make_attention_backend("triton", indexed, num_heads=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_float64(shape: Shape, dtype: str) -> None:
    """Prompts, the rest of prompts and single tokens in one step; NaN lies where it must not read."""
    starts, ends = [0, 76, 40, 299, 0, 199, 63, 128], [50, 77, 300, 300, 1, 200, 65, 190]
    sequences = latent_sequences(shape, ends, dtype)
    for name in ("cpu", "torch"):
        outs = _run(name, shape, sequences, starts, ends, dtype=dtype)
        for out, s, start, end in zip(outs, sequences, starts, ends, strict=True):
            assert (out.double() - latent_reference(shape, s, start, end)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_step(dtype: str, threads: int) -> None:
    """A prompt at once = in chunks = token by token, alone or beside others."""
    shape, lengths = Shape(6, 48, 32), [150, 67, 1]
    sequences = latent_sequences(shape, lengths, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = _run("cpu", shape, sequences, [0, 0, 0], lengths, dtype=dtype)
    finally:
        torch.set_num_threads(before)
    cuts = {0: [0, 64, 65, 130, 150], 1: list(range(68))}
    for i, ends in cuts.items():
        s = sequences[i]
        alone = Sequence(q=s.q, k=s.k, v=s.v, pages=list(range(1, len(s.pages) + 1)))
        parts = [_run("cpu", shape, [alone], [a], [b], dtype=dtype)[0] for a, b in pairwise(ends)]
        assert torch.equal(torch.cat(parts), together[i])


def test_sizes_that_do_not_fit_vectors_are_computed_by_torch() -> None:
    for width, rank in ((40, 32), (48, 24)):
        backend = make_attention_backend(
            "auto", latent_pool(Shape(4, width, rank), "float32", num_pages=1), num_heads=4
        )
        assert isinstance(backend, TorchLatents)


def latent_pool(shape: Shape, dtype: str, *, num_pages: int) -> KVPool:
    spec = CacheSpec(num_kv_heads=1, head_dim=shape.width, dtype=dtype, latent=shape.rank)
    return KVPool([spec, spec], num_pages=num_pages, page_size=PAGE, device="cpu")


def latent_sequences(shape: Shape, lengths: list[int], dtype: str) -> list[Sequence]:
    """Latents have a mean square of 1."""
    sequences = make_sequences(Heads(q=shape.heads, kv=1, dim=shape.width), lengths, page_size=PAGE, dtype=dtype)
    for s in sequences:
        kept = s.k[:, :, : shape.rank]
        kept /= kept.square().mean(-1, keepdim=True).sqrt()
    return sequences


def _run(
    name: str, shape: Shape, sequences: list[Sequence], starts: list[int], ends: list[int], *, dtype: str
) -> list[torch.Tensor]:
    pool = latent_pool(shape, dtype, num_pages=max(max(s.pages) for s in sequences))
    assert pool.num_pages >= pages_needed(ends, PAGE) or len(sequences) == 1
    for layer in range(2):
        pool.k(layer).fill_(torch.nan)
    for s, start in zip(sequences, starts, strict=True):
        at = torch.arange(start)
        pool.write(1, torch.tensor(s.pages)[at // PAGE] if start else at, at % PAGE, s.k[:start], s.k[:start])
    backend = make_attention_backend(name, pool, num_heads=shape.heads)
    assert isinstance(backend, CpuLatents if name == "cpu" else TorchLatents)
    backend.begin(make_step(sequences, starts, ends, page_size=PAGE, extend=True))
    q, latents = (
        torch.cat([rows[a:b] for rows, a, b in zip(kept, starts, ends, strict=True)])
        for kept in ([s.q for s in sequences], [s.k[:, 0] for s in sequences])
    )
    out = backend.attend(1, latents_by_no_angle(q, latents, rank=shape.rank, scale=SCALE))
    return list(out.split([b - a for a, b in zip(starts, ends, strict=True)]))


def latent_reference(shape: Shape, s: Sequence, start: int, end: int) -> torch.Tensor:
    q, latents = s.q[start:end].double(), s.k[:end, 0].double()
    scores = torch.einsum("qhd,kd->hqk", q, latents) * SCALE
    hidden = torch.arange(end)[None, :] > torch.arange(start, end)[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,kd->qhd", weights, latents[:, : shape.rank]).flatten(1)
