"""Attention by Triton: split-KV decode and extend over pages, without waiting for the device.

Never run on a GPU yet; tested in the interpreter.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.kernels.triton_decode import DecodeTiles, decode, decode_tiles, split_list
from engine.kernels.triton_extend import extend, extend_tiles
from engine.kernels.triton_kv_write import kv_write
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import DeviceExtend, DeviceStep, StepBatch
from engine.kv.upload import upload


@dataclass(frozen=True, slots=True)
class _Decode:
    """A step of single tokens. `splits`: by the tiles of a layer, which all layers of one shape share."""

    kv_lens: torch.Tensor
    splits: dict[DecodeTiles, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Extend:
    kv_lens: torch.Tensor
    starts: torch.Tensor
    most_rows: int


class TritonBackend:
    """K and V of the new tokens are written first, then read back."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._tiles = [self._tiles_of(layer) for layer in range(pool.num_layers)]
        self._now: _Decode | _Extend | None = None
        self._page_table = torch.empty(0, dtype=torch.int32)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._token_pages = self._token_offsets = torch.empty(0, dtype=torch.int64)

    def begin(self, step: StepBatch) -> None:
        kv_lens = self._upload(list(step.kv_lens))
        if step.extend:
            starts = self._upload([0, *accumulate(step.q_lens)])
            self._now = _Extend(kv_lens, starts, max(step.q_lens))
        else:
            self._now = self._decode_of(kv_lens)
        self._take(step)

    def begin_on_device(self, step: DeviceStep | DeviceExtend) -> None:
        if isinstance(step, DeviceExtend):
            self._now = _Extend(step.kv_lens, step.starts, most_rows=len(step.token_pages))
        else:
            self._now = self._decode_of(step.kv_lens)
        self._take(step)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        now = self._now
        assert now is not None, "begin() comes first"
        cache_k, cache_v = self._pool.k(layer), self._pool.v(layer)
        kv_write(k, v, cache_k, cache_v, pages=self._token_pages, offsets=self._token_offsets)
        rows = q.to(cache_k.dtype)
        assert rows.stride()[1:] == (q.shape[2], 1), rows.stride()
        if isinstance(now, _Extend):
            out = extend(
                rows,
                cache_k,
                cache_v,
                page_table=self._page_table,
                slots=self._slots,
                starts=now.starts,
                kv_lens=now.kv_lens,
                most_rows=now.most_rows,
                tiles=extend_tiles(dim=q.shape[2], dtype=cache_k.dtype),
            )
        else:
            tiles = self._tiles[layer]
            out = decode(
                rows,
                cache_k,
                cache_v,
                page_table=self._page_table,
                slots=self._slots,
                kv_lens=now.kv_lens,
                splits=now.splits[tiles],
                tiles=tiles,
            )
        return out.flatten(1).to(q.dtype)

    def _take(self, step: StepBatch | DeviceStep | DeviceExtend) -> None:
        self._token_pages, self._token_offsets = step.token_pages, step.token_offsets
        self._page_table, self._slots = step.page_table, step.slots
        assert self._page_table.dtype == torch.int32 and self._page_table.stride(1) == 1, self._page_table.dtype

    def _decode_of(self, kv_lens: torch.Tensor) -> _Decode:
        return _Decode(kv_lens, {tiles: split_list(kv_lens, tiles=tiles) for tiles in dict.fromkeys(self._tiles)})

    def _tiles_of(self, layer: int) -> DecodeTiles:
        cache = self._pool.k(layer)
        return decode_tiles(kv_heads=cache.shape[2], dim=cache.shape[3], dtype=cache.dtype)

    def _upload(self, values: list[int]) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.int32), self._pool.device)
