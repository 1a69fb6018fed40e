"""Random paged batches and a float64 reference that reads nothing of the code under test."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from engine.attention.backend import AttentionBackend
from engine.kernels.paged_attention import PagedExtend, Softmax
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import DeviceExtend, DeviceStep, StepBatch, TreePaths
from engine.layers.latents import NewLatents, TokenChooser
from engine.layers.linear import RMSNorm
from engine.layers.rope import NormedRope, Unturned

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


@dataclass
class Heads:
    q: int
    kv: int
    dim: int


@dataclass
class Sequence:
    """One request: all its q, k, v [kv_len, heads, dim] and the pages it owns."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pages: list[int]


def make_pool(
    heads: Heads,
    *,
    num_pages: int,
    page_size: int,
    dtype: str = "float32",
    layers: int = 2,
    units: int = 1,
    **kind: Any,
) -> KVPool:
    """`kind`: other fields of CacheSpec."""
    spec = CacheSpec(num_kv_heads=heads.kv, head_dim=heads.dim, dtype=dtype, **kind)
    return KVPool([spec] * layers, num_pages=num_pages, page_size=page_size, device="cpu", units=units)


def make_sequences(heads: Heads, lengths: list[int], *, page_size: int, dtype: str, seed: int = 0) -> list[Sequence]:
    """Requests whose pages are scattered over the pool in random order, with a hole (guard page) after each."""
    rng = np.random.default_rng(seed)
    counts = [-(-n // page_size) for n in lengths]
    ids = (1 + rng.permutation(sum(counts))).tolist()
    sequences = []
    for n, count in zip(lengths, counts, strict=True):
        pages, ids = ids[:count], ids[count:]
        q, k, v = (
            torch.from_numpy(rng.standard_normal((n, h, heads.dim), dtype=np.float32)).to(getattr(torch, dtype))
            for h in (heads.q, heads.kv, heads.kv)
        )
        sequences.append(Sequence(q=q, k=k, v=v, pages=pages))
    return sequences


def pages_needed(lengths: list[int], page_size: int) -> int:
    return sum(-(-n // page_size) for n in lengths)


def make_step(
    sequences: list[Sequence], starts: list[int], ends: list[int], *, page_size: int, extend: bool
) -> StepBatch:
    """The step that computes tokens starts[i]..ends[i]-1 of each request. Slots of no request hold no page's number."""
    slots = [2 * i + 1 for i in reversed(range(len(sequences)))]
    table = torch.full((2 * len(sequences) + 1, max(len(s.pages) for s in sequences) + 1), -1, dtype=torch.int32)
    positions, pages = [], []
    for slot, s, start, end in zip(slots, sequences, starts, ends, strict=True):
        table[slot] = torch.tensor(s.pages + [0] * (table.shape[1] - len(s.pages)), dtype=torch.int32)
        positions += range(start, end)
        pages += [s.pages[p // page_size] for p in range(start, end)]
    positions_t = torch.tensor(positions)
    return StepBatch(
        extend=extend,
        q_lens=[e - s for s, e in zip(starts, ends, strict=True)],
        kv_lens=list(ends),
        page_table=table,
        slots=torch.tensor(slots),
        token_pages=torch.tensor(pages),
        token_offsets=positions_t % page_size,
    )


def on_device(step: StepBatch) -> DeviceStep | DeviceExtend:
    """`step` with wider tables, and a padded row, which is a request of its own among single tokens."""
    table, kv_lens = pad(step.page_table, (0, 7, 0, 1)), torch.tensor(step.kv_lens, dtype=torch.int32)
    pages, offsets = pad(step.token_pages, (0, 1)), pad(step.token_offsets, (0, 1))
    if step.extend:
        starts = torch.tensor([0, *np.cumsum(step.q_lens)], dtype=torch.int32)
        return DeviceExtend(table, step.slots, starts, kv_lens, pages, offsets)
    slots, paths = pad(step.slots, (0, 1), value=len(step.page_table)), None
    if step.paths is not None:
        paths = TreePaths(pad(step.paths.starts, (0, 1), value=1), pad(step.paths.places, (0, 0, 0, 1)))
    return DeviceStep(table, slots, pad(kv_lens, (0, 1), value=1), pages, offsets, paths)


def run_step(
    backend: AttentionBackend | PagedExtend,
    sequences: list[Sequence],
    starts: list[int],
    ends: list[int],
    *,
    page_size: int,
    extend: bool = True,
    layer: int = 1,
    riders: list[int] | None = None,
    softmax: Softmax | None = None,
) -> list[torch.Tensor]:
    """Per request: [end - start, heads * dim]."""
    backend.begin(replace(make_step(sequences, starts, ends, page_size=page_size, extend=extend), riders=riders))
    rows = [
        torch.cat([getattr(s, name)[a:b] for s, a, b in zip(sequences, starts, ends, strict=True)]) for name in "qkv"
    ]
    out = attend(backend, layer, *rows, softmax=softmax)
    return list(out.split([b - a for a, b in zip(starts, ends, strict=True)]))


def attend(
    backend: AttentionBackend | PagedExtend,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax: Softmax | None = None,
) -> torch.Tensor:
    """As `attend_rotated`, of any backend."""
    if isinstance(backend, PagedExtend):
        return backend.attend_rotated(layer, q, k, v, softmax or Softmax(q.shape[2] ** -0.5))
    return backend.attend(layer, by_no_angle(q, k, v, softmax))


def by_no_angle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax | None = None) -> Unturned:
    """q, k and v that stay what they are."""
    one = torch.ones(len(q), 1, q.shape[2], dtype=q.dtype, device=q.device)
    return Unturned(
        torch.cat((q, k, v), 1),
        k.shape[1],
        NormedRope(None, like=q, eps=0.0),
        (one, torch.zeros_like(one)),
        softmax or Softmax(q.shape[2] ** -0.5),
    )


def latents_by_no_angle(
    q: torch.Tensor, latents: torch.Tensor, *, rank: int, scale: float, chooser: TokenChooser | None = None
) -> NewLatents:
    """As `by_no_angle`. Triton's kernel norms latents, so they must have a mean square of 1; others leave them."""
    absorbed, dim = q.clone(), q.shape[2]
    absorbed[:, :, rank:] = torch.nan
    one = torch.ones(len(q), 1, dim - rank, dtype=q.dtype, device=q.device)
    return NewLatents(
        absorbed,
        q[:, :, rank:],
        latents[:, :dim],
        _NoNorm(torch.ones(rank, dtype=q.dtype, device=q.device), eps=0.0),
        (one, torch.zeros_like(one)),
        scale,
        None if chooser is None else (latents[:, dim:], chooser),
    )


class _NoNorm(RMSNorm):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def fill(pool: KVPool, sequences: list[Sequence], ends: list[int], *, layer: int = 1) -> None:
    """Put tokens 0..end-1 of each request into the pool, as earlier steps would have."""
    for s, end in zip(sequences, ends, strict=True):
        at = torch.arange(end)
        pages = torch.tensor(s.pages)[at // pool.page_size] if end else at
        pool.write(layer, pages, at % pool.page_size, s.k[:end], s.v[:end])


def all_heads(pool: KVPool, layer: int) -> torch.Tensor:
    """What a layer keeps, wherever it lies: [2, 1 + num_pages, page_size, kv_heads, head_dim], K then V."""
    return torch.stack([torch.cat([kept(layer, unit) for unit in range(pool.units)], 2) for kept in (pool.k, pool.v)])


def filled_pool(
    heads: Heads, sequences: list[Sequence], starts: list[int], *, page_size: int = 16, units: int = 1
) -> KVPool:
    """As large as these requests are, with tokens 0..start-1 of each; of their dtype."""
    num_pages, dtype = sum(len(s.pages) for s in sequences), str(sequences[0].k.dtype).removeprefix("torch.")
    pool = make_pool(heads, num_pages=num_pages, page_size=page_size, dtype=dtype, units=units)
    fill(pool, sequences, starts)
    return pool


def reference(s: Sequence, start: int, end: int, *, window: int = 0, softmax: Softmax | None = None) -> np.ndarray:
    """Float64 causal attention of rows start..end-1: [end - start, heads * dim]. `window`: 0 is all tokens."""
    softmax = softmax or Softmax(s.q.shape[2] ** -0.5)
    q, k, v = (x.double().numpy() for x in (s.q[start:end], s.k[:end], s.v[:end]))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) * softmax.scale
    if softmax.cap:
        scores = np.tanh(scores / softmax.cap) * softmax.cap
    ahead = np.arange(end)[None, :] - np.arange(start, end)[:, None]
    hidden = (ahead > 0) | (ahead <= -window if window else False)
    scores = np.where(hidden[None], -np.inf, scores)
    if softmax.sinks is not None:
        sinks = np.broadcast_to(softmax.sinks.double().numpy()[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate((scores, sinks), -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights[..., :end], v).reshape(end - start, -1)


def poisoned_pool(heads: Heads, lengths: list[int], *, page_size: int, dtype: str, window: int = 0) -> KVPool:
    """NaN where a kernel must not read: the new tokens' places, the tails of last pages, layer 0, the scratch page."""
    num_pages = pages_needed(lengths, page_size)
    pool = make_pool(heads, num_pages=num_pages, page_size=page_size, dtype=dtype, window=window)
    for layer in range(2):
        pool.k(layer).fill_(torch.nan)
        pool.v(layer).fill_(torch.nan)
    return pool


def worst_error(
    outs: list[torch.Tensor],
    sequences: list[Sequence],
    starts: list[int],
    ends: list[int],
    *,
    window: int = 0,
    softmax: Softmax | None = None,
) -> float:
    return max(
        float(np.abs(out.double().numpy() - reference(s, a, b, window=window, softmax=softmax)).max())
        for out, s, a, b in zip(outs, sequences, starts, ends, strict=True)
    )
