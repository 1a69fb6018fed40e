"""Attention by Triton: split-KV decode and extend over pages, without host syncs.

Piggybacked decodes get decode kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.attention.flashinfer_prompts import FlashInferPrompts
from engine.kernels.paged_attention import Softmax
from engine.kernels.triton.decode import (
    DecodeTiles,
    PagedLayer,
    SplitList,
    decode,
    decode_tiles,
    head_tiles,
    latent_decode_tiles,
    parts_bytes,
    split_list,
)
from engine.kernels.triton.extend import (
    ExtendTiles,
    ExtendWork,
    any_whole,
    extend,
    extend_tiles,
    latent_extend_tiles,
    lists_of,
    work_of,
)
from engine.kernels.triton.extend_plan import ExtendShape, plan_extend
from engine.kernels.triton.latent_write import latent_write
from engine.kernels.triton.rope_write import rope_write
from engine.kv.kv_pool import DTYPES, KVPool
from engine.kv.step_batch import DeviceExtend, DeviceStep, StepBatch, TreePaths, upload
from engine.layers.latents import NewLatents
from engine.layers.rope import Unturned

ALIGNED = 4  # int32 in 16 bytes


@dataclass(frozen=True, slots=True)
class _Decode:
    splits: "dict[_Shape, SplitList]"
    paths: TreePaths | None


@dataclass(frozen=True, slots=True)
class _Riders:
    """Decodes in a step with prompts: rows, int64[n]."""

    rows: torch.Tensor
    decode: _Decode


@dataclass(frozen=True, slots=True)
class _Extend:
    kv_lens: torch.Tensor
    starts: torch.Tensor
    work: "dict[_Shape, ExtendWork]"
    library: Sequence[int] = ()
    riders: _Riders | None = None


@dataclass(frozen=True, slots=True)
class _Shape:
    """Parameters of a layer's split; `decode_heads` are tiles of heads for latents."""

    kv_heads: int
    decode_heads: int
    window: int
    rest: int
    decode: DecodeTiles
    extend: ExtendTiles

    def extend_shape(self, num_heads: int) -> ExtendShape:
        return ExtendShape(
            group=num_heads // self.kv_heads,
            kv_heads=self.kv_heads,
            rows=self.extend.rows,
            block=self.extend.block,
            window=self.window,
            pairs=self.rest > 0,
        )


class TritonBackend:
    def __init__(self, pool: KVPool, *, num_heads: int, prompts: FlashInferPrompts | None = None) -> None:
        """`prompts` computes long prompts of known lengths."""
        self._pool = pool
        self._prompts = prompts
        self._num_heads = num_heads
        self._shapes = [self._shape_of(layer) for layer in range(pool.num_layers)]
        self._units = [pool.units_of(layer) for layer in range(pool.num_layers)]
        self._now: _Decode | _Extend | None = None
        self._page_table = torch.empty(0, dtype=torch.int32)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._token_pages = self._token_offsets = torch.empty(0, dtype=torch.int64)

    def begin(self, step: StepBatch) -> None:
        if step.extend:
            self._now = self._extend_of(step)
        else:
            self._now = self._decode_of(*self._upload(step.kv_lens), step.slots, step.paths)
        self._take(step)

    def begin_on_device(self, step: DeviceStep | DeviceExtend) -> None:
        if isinstance(step, DeviceExtend):
            most_rows, requests, device = len(step.token_pages), len(step.kv_lens), self._pool.device
            work = {
                shape: any_whole(
                    most_rows=most_rows * (self._num_heads if shape.rest else 1),
                    requests=requests,
                    tiles=shape.extend,
                    device=device,
                )
                for shape in dict.fromkeys(self._shapes)
            }
            self._now = _Extend(step.kv_lens, step.starts, work)
        else:
            self._now = self._decode_of(step.kv_lens, step.slots, step.paths)
        self._take(step)

    def parts_bytes(self, rows: int) -> int:
        heads, device = self._num_heads, self._pool.device
        sizes = [
            parts_bytes(
                rows,
                heads=heads,
                kv_heads=shape.decode_heads,
                dim=spec.latent or spec.head_dim,
                tiles=shape.decode,
                device=device,
            )
            for shape, spec in zip(self._shapes, self._pool.specs, strict=True)
        ]
        return max(sizes)

    def attend(self, layer: int, new: Unturned) -> torch.Tensor:
        q = rope_write(
            new.qkv,
            new.turn,
            self._pool.k(layer),
            self._pool.v(layer),
            weight=new.rope.weight,
            eps=new.rope.eps,
            offset=new.rope.offset,
            pages=self._token_pages,
            offsets=self._token_offsets,
            units=self._units[layer],
        )
        return self.attend_written(layer, q, new.softmax)

    def attend_written(self, layer: int, q: torch.Tensor, softmax: Softmax) -> torch.Tensor:
        """Attend over written K and V; q [T, heads, head_dim] is rotated."""
        now = self._now
        assert now is not None, "begin() comes first"
        pages, shape = self._paged(layer, softmax), self._shapes[layer]
        rows = q.to(DTYPES[self._pool.specs[layer].dtype])
        if isinstance(now, _Decode):
            return _decoded(rows, pages, shape, now).flatten(1).to(q.dtype)
        out = extend(
            rows,
            pages,
            slots=self._slots,
            starts=now.starts,
            kv_lens=now.kv_lens,
            work=now.work[shape],
            tiles=shape.extend,
        )
        if now.library and self._prompts is not None:
            self._prompts.attend(layer, rows, out)
        if (riders := now.riders) is not None:
            decoded = _decoded(rows[riders.rows], pages, shape, riders.decode)
            out.index_copy_(0, riders.rows, decoded)
        return out.flatten(1).to(q.dtype)

    def _paged(self, layer: int, softmax: Softmax) -> PagedLayer:
        shape, units = self._shapes[layer], self._units[layer]
        cache = self._pool.k(layer), self._pool.v(layer)
        return PagedLayer(*cache, self._page_table, softmax, units, shape.window, shape.rest)

    def _take(self, step: StepBatch | DeviceStep | DeviceExtend) -> None:
        self._token_pages, self._token_offsets = step.token_pages, step.token_offsets
        self._page_table, self._slots = step.page_table, step.slots
        assert self._page_table.dtype == torch.int32 and self._page_table.stride(1) == 1, self._page_table.dtype

    def _decode_of(self, kv_lens: torch.Tensor, slots: torch.Tensor, paths: TreePaths | None) -> _Decode:
        splits = {
            shape: split_list(kv_lens, slots, kv_heads=shape.decode_heads, tiles=shape.decode, window=shape.window)
            for shape in dict.fromkeys(self._shapes)
        }
        assert paths is None or paths.places.stride(1) == 1, paths
        return _Decode(splits, paths)

    def _extend_of(self, step: StepBatch) -> _Extend:
        riders = step.riders or ()
        plans = {
            shape: plan_extend(
                step.q_lens,
                step.kv_lens,
                shape.extend_shape(self._num_heads),
                has_library=self._prompts is not None,
                skip=frozenset(riders),
            )
            for shape in dict.fromkeys(self._shapes)
        }
        lists = [each for plan in plans.values() for each in lists_of(plan)]
        kv_lens, starts, *units = self._upload(step.kv_lens, [0, *accumulate(step.q_lens)], *lists)
        on_device = iter(units)
        work = {shape: work_of(plan, on_device) for shape, plan in plans.items()}
        library = next(iter(plans.values())).library
        if library and self._prompts is not None:
            self._prompts.begin(step, library)
        return _Extend(kv_lens, starts, work, library, self._riders_of(step, riders) if riders else None)

    def _riders_of(self, step: StepBatch, riders: Sequence[int]) -> _Riders:
        spans = step.spans()
        rows, requests = upload([[spans[i][0] for i in riders], riders], self._pool.device)
        (kv_lens,) = self._upload([step.kv_lens[i] for i in riders])
        paths = None if step.paths is None else step.paths.of(requests)
        return _Riders(rows, self._decode_of(kv_lens, step.slots[requests], paths))

    def _shape_of(self, layer: int) -> _Shape:
        cache, spec = self._pool.k(layer), self._pool.specs[layer]
        kv_heads, dim, dtype, codes = spec.num_kv_heads, cache.shape[3], DTYPES[spec.dtype], spec.fp8
        if not spec.latent:
            decode = decode_tiles(kv_heads=kv_heads, dim=dim, dtype=dtype, codes=codes)
            extend = extend_tiles(dim=dim, dtype=dtype, exponents=cache.shape[2] if codes else 0)
            return _Shape(kv_heads, kv_heads, spec.window, 0, decode, extend)
        heads, rest = head_tiles(self._num_heads), dim - spec.latent
        assert kv_heads == 1 and rest > 0 and not spec.index, spec
        decode = latent_decode_tiles(tiles_of_heads=heads, dtype=dtype, codes=codes)
        return _Shape(kv_heads, heads, spec.window, rest, decode, latent_extend_tiles(dtype=dtype))

    def _upload(self, *lists: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Upload int32 lists in one copy, 16-byte aligned, since Triton recompiles for others."""
        sizes = [-(-len(values) // ALIGNED) * ALIGNED for values in lists]
        flat = [x for values, size in zip(lists, sizes, strict=True) for x in (*values, *[0] * (size - len(values)))]
        whole = upload(torch.tensor(flat, dtype=torch.int32), self._pool.device)
        return tuple(part[: len(values)] for part, values in zip(whole.split(sizes), lists, strict=True))


def _decoded(rows: torch.Tensor, pages: PagedLayer, shape: _Shape, now: _Decode) -> torch.Tensor:
    return decode(rows, pages, splits=now.splits[shape], tiles=shape.decode, paths=now.paths)


class TritonLatents(TritonBackend):
    """MLA, also for captured steps: one KV head; V is the first elements of K."""

    def attend(self, layer: int, new: NewLatents) -> torch.Tensor:  # type: ignore[override]
        q = latent_write(
            new.q,
            new.rotary,
            new.latents,
            new.turn,
            self._pool.k(layer),
            norm=(new.norm.weight, new.norm.eps),
            places=(self._token_pages, self._token_offsets),
        )
        return self.attend_written(layer, q, Softmax(new.scale))
