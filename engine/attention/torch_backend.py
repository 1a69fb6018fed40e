"""Attention in plain torch, for any dtype and device: slow; the kernels' reference."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels.paged_attention import PagedDecode, PagedExtend, Softmax, make_paged_decode, make_paged_extend
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch
from engine.layers.rope import Unturned

QUERY_TILE = 1024  # rows per masked call: bounds the mask, and skips most of the upper triangle


class TorchBackend:
    """Gathers each request's pages, then calls SDPA."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._step: StepBatch | None = None
        self._requests: list[_Request] = []

    def begin(self, step: StepBatch, *, skip: frozenset[int] = frozenset()) -> None:
        """`skip`: requests with written KV and undefined output rows."""
        self._step = step
        rows = step.page_rows(self._pool.page_size)
        paths = _paths_of(step)
        self._requests = [
            _Request(span, step.kv_lens[i], pages, self._pool.page_size, path)
            for i, (span, pages, path) in enumerate(zip(step.spans(), rows, paths, strict=True))
            if i not in skip
        ]

    def attend(self, layer: int, new: Unturned) -> torch.Tensor:
        return self.attend_rotated(layer, *new.turned(), new.softmax)

    def attend_rotated(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax
    ) -> torch.Tensor:
        """Attend with rotated q [T, heads, head_dim] and k, v [T, kv_heads, head_dim]."""
        assert self._step is not None, "begin() comes first"
        self._pool.write(layer, self._step.token_pages, self._step.token_offsets, k, v)
        out, window = torch.empty_like(q), self._pool.specs[layer].window
        for request in self._requests:
            rows = slice(request.first, request.end)
            keys, values = self._keys_values(layer, request, k, v)
            out[rows] = self._attend_request(request, q[rows], keys, values, softmax, window=window)
        return out.flatten(1)

    def _keys_values(
        self, layer: int, request: "_Request", k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if request.prefix_len == 0:
            rows = slice(request.first, request.end)
            # rounded as in the cache: a later chunk must read what this one used
            return self._pool.rounded(layer, k[rows]).to(k.dtype), self._pool.rounded(layer, v[rows]).to(v.dtype)
        keys, values = (request.seen(kept) for kept in self._pool.read(layer, request.pages))
        return keys.to(k.dtype), values.to(v.dtype)

    def _attend_request(
        self,
        request: "_Request",
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        softmax: Softmax,
        *,
        window: int,
    ) -> torch.Tensor:
        window = window if window < request.kv_len else 0
        if request.q_len == 1:
            return _attention(q, _batched(keys[-window:]), _batched(values[-window:]), softmax)
        keys, values = _batched(keys), _batched(values)
        if request.prefix_len == 0 and not window and softmax.is_plain:
            return _attention(q, keys, values, softmax, is_causal=True)
        return torch.cat(
            [
                _attention(q[rows], keys[:, :, seen], values[:, :, seen], softmax, mask=mask)
                for rows, seen, mask in request.tiles(window)
            ]
        )


class _Tile(NamedTuple):
    """Query rows, keys visible to any of them, and mask [rows, keys]."""

    rows: slice
    seen: slice
    mask: torch.Tensor


class _Request:
    def __init__(
        self, span: tuple[int, int], kv_len: int, pages: torch.Tensor, page_size: int, path: Sequence[int]
    ) -> None:
        """`path`: positions of its newest tokens, if out of order."""
        self.first, self.end = span
        self.q_len = self.end - self.first
        self.kv_len = kv_len
        self.prefix_len = self.kv_len - self.q_len
        assert self.prefix_len >= 0, (self.q_len, self.kv_len)
        end = max(kv_len, *(place + 1 for place in path)) if path else kv_len
        self.pages = pages[: -(-end // page_size)]
        self._order = torch.tensor([*range(kv_len - len(path)), *path], device=pages.device) if path else None
        self._tiles: dict[int, list[_Tile]] = {}

    def seen(self, kept: torch.Tensor) -> torch.Tensor:
        """Its tokens, [kv_len, ...]."""
        return kept[: self.kv_len] if self._order is None else kept[self._order]

    def tiles(self, window: int) -> "list[_Tile]":
        if window not in self._tiles:
            ends = [min(first + QUERY_TILE, self.q_len) for first in range(0, self.q_len, QUERY_TILE)]
            self._tiles[window] = [self._tile(i * QUERY_TILE, end, window) for i, end in enumerate(ends)]
        return self._tiles[window]

    def _tile(self, first: int, end: int, window: int) -> "_Tile":
        device, start = self.pages.device, self.prefix_len + first
        seen = slice(max(0, start - window + 1) if window else 0, self.prefix_len + end)
        rows = torch.arange(start, self.prefix_len + end, device=device)[:, None]
        keys = torch.arange(seen.start, seen.stop, device=device)[None, :]
        mask = keys <= rows
        return _Tile(slice(first, end), seen, mask & (keys > rows - window) if window else mask)


def _paths_of(step: StepBatch) -> list[list[int]]:
    if step.paths is None:
        return [[] for _ in step.kv_lens]
    starts, places = step.paths.starts.tolist(), step.paths.places.tolist()
    return [of[: kv_len - start] for of, start, kv_len in zip(places, starts, step.kv_lens, strict=True)]


def _batched(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax: Softmax,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return q's shape; keys, values [1, kv_heads, n, head_dim]; mask [rows, n]."""
    if softmax.is_plain:
        out = scaled_dot_product_attention(
            _batched(q), keys, values, attn_mask=mask, is_causal=is_causal, scale=softmax.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    assert not is_causal, "a mask says what is seen"
    return _written_out(q, keys[0], values[0], softmax, mask)


def _written_out(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax: Softmax, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend with softmax options that SDPA lacks, in fp32."""
    heads, group = q.shape[1], q.shape[1] // len(keys)
    grouped = q.float().unflatten(1, (len(keys), group))  # [n, kv_heads, group, head_dim]
    scores = torch.einsum("nhgd,hsd->hgns", grouped, keys.float()) * softmax.scale
    if softmax.cap:
        scores = torch.tanh(scores / softmax.cap) * softmax.cap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if softmax.sinks is not None:
        sinks = softmax.sinks.view(len(keys), group, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return torch.einsum("hgns,hsd->nhgd", weights, values.float()).reshape(-1, heads, q.shape[2]).to(q.dtype)


class CpuBackend:
    """CPU attention by C kernels for prompts and single tokens, or by torch.

    A step may have both (`--enable-mixed-chunk`); a request's kernel does not depend on its batch.
    """

    def __init__(self, pool: KVPool) -> None:
        self._prompts: PagedExtend | TorchBackend = make_paged_extend(pool) or TorchBackend(pool)
        self._decode = make_paged_decode(pool)
        self._now: PagedDecode | PagedExtend | TorchBackend = self._prompts
        self._riders: torch.Tensor | None = None  # rows of single tokens in a step with prompts

    @property
    def has_kernel(self) -> bool:
        """Decode has the C kernel (torch is several times slower)."""
        return self._decode is not None

    @property
    def has_prompt_kernel(self) -> bool:
        """Prompts have the C kernel, which needs bf16."""
        return isinstance(self._prompts, PagedExtend)

    def begin(self, step: StepBatch) -> None:
        self._riders = None
        if self._decode is None:
            self._prompts.begin(step)
            return
        single = self._single(step)
        if len(single) == len(step.q_lens):
            self._now = self._decode
            self._decode.begin(step)
            return
        self._now = self._prompts
        self._prompts.begin(step, skip=frozenset(single))
        if single:
            spans = step.spans()
            self._riders = torch.tensor([spans[i][0] for i in single])
            self._decode.begin(_riders_of(step, single, self._riders))

    def _single(self, step: StepBatch) -> Sequence[int]:
        """Return the decode kernel's requests; a prompt's last token keeps the prompt kernel's
        bits.
        """
        if step.extend and step.riders is not None and self.has_prompt_kernel:
            return step.riders
        return [i for i, n in enumerate(step.q_lens) if n == 1]

    def attend(self, layer: int, new: Unturned) -> torch.Tensor:
        q, k, v = new.turned()
        out = self._now.attend_rotated(layer, q, k, v, new.softmax)
        rows = self._riders
        if rows is not None and self._decode is not None:
            out[rows] = self._decode.attend_rotated(layer, q[rows], k[rows], v[rows], new.softmax)
        return out


def _riders_of(step: StepBatch, requests: Sequence[int], rows: torch.Tensor) -> StepBatch:
    chosen = torch.tensor(requests)
    return replace(
        step,
        extend=False,
        q_lens=[1] * len(requests),
        kv_lens=[step.kv_lens[i] for i in requests],
        slots=step.slots[chosen],
        token_pages=step.token_pages[rows],
        token_offsets=step.token_offsets[rows],
        drafted=frozenset(n for n, i in enumerate(requests) if i in step.drafted),
        paths=None if step.paths is None else step.paths.of(chosen),
    )
