"""Long prompt attention by FlashInfer, on sm_90 FlashAttention-3. Never run on a GPU.

Its sm_90 kernels split no context: they compute what `plan_extend` leaves whole; few rows with a
long context stay with Triton. Other GPUs split nothing either, for equal results in any batch.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import DTYPES, KVPool
from engine.kv.step_batch import StepBatch, upload
from service.extras import install
from service.flags import ConfigError

CACHE_DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 16 << 20  # holds parts of split contexts: none
PLANS_IN_FLIGHT = 4  # more than the steps launched ahead
REACH_BYTES = 16 << 32  # its sm_90 kernels count 16 bytes in 32 bits (block_sparse_gather.cuh)


def import_wrapper() -> Any:
    """Raises ConfigError."""
    try:
        return import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"--attention-backend flashinfer: {error}; run: {install('flashinfer')}, or choose triton"
        ) from error


def check_specs(specs: tuple[CacheSpec, ...]) -> None:
    """Raises ConfigError for caches without a kernel, or different layers."""
    for spec in specs:
        if spec.dtype not in CACHE_DTYPES or spec.head_dim not in HEAD_DIMS or spec != specs[0]:
            raise ConfigError(
                "--attention-backend flashinfer: needs heads of 64, 128 or 256 in bfloat16 or float16, the same in all "
                f"layers, not {spec.head_dim} in {spec.dtype}; choose triton"
            )


def check_reach(pool: KVPool) -> None:
    """Raises ConfigError for a pool with pages that no kernel reaches: addresses would wrap."""
    if (1 + pool.num_pages) * pool.page_bytes > REACH_BYTES:
        fits = (REACH_BYTES // pool.page_bytes - 1) * pool.page_size
        raise ConfigError(
            f"--attention-backend flashinfer: reaches {REACH_BYTES >> 30} GiB of KV cache, not "
            f"{pool.num_pages * pool.page_bytes / 2**30:.1f}; give --max-total-tokens {fits} at most, or choose triton"
        )


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Requests' K and V in FlashInfer's form, int32 on the host.

    qo_indptr, kv_indptr [n + 1], last_page_lens, kv_lens [n]; at int64[2, pages]: request and page
    index of each page.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_lens: torch.Tensor
    kv_lens: torch.Tensor
    at: torch.Tensor


def paged_layout(step: StepBatch, requests: list[int], *, page_size: int) -> PagedLayout:
    kv_lens = torch.tensor([step.kv_lens[i] for i in requests], dtype=torch.int32)
    pages = (kv_lens + page_size - 1) // page_size
    kv_indptr = _ends(pages)
    column = torch.arange(int(kv_indptr[-1])) - torch.repeat_interleave(kv_indptr[:-1], pages)
    return PagedLayout(
        qo_indptr=_ends(torch.tensor([step.q_lens[i] for i in requests], dtype=torch.int32)),
        kv_indptr=kv_indptr,
        last_page_lens=kv_lens - (pages - 1) * page_size,
        kv_lens=kv_lens,
        at=torch.stack((torch.repeat_interleave(torch.tensor(requests), pages), column)),
    )


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


class _Plan:
    """FlashInfer wrapper; a copy may still read its pinned plan."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._copied: torch.cuda.Event | None = None

    def make(self, *args: Any, **kwargs: Any) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self.wrapper.plan(*args, **kwargs)
        if self.wrapper.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()


class FlashInferPrompts:
    """FlashInfer attention; compiling takes minutes without its cache."""

    def __init__(self, pool: KVPool, *, num_heads: int, wrapper: Any) -> None:
        assert len(set(pool.specs)) == 1, pool.specs
        self._pool = pool
        self._num_heads = num_heads
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._plans = [_Plan(wrapper(workspace, "NHD")) for _ in range(PLANS_IN_FLIGHT)]
        self._rows: torch.Tensor | None = None  # rows of the step, [n] int64; None: all
        one, first = torch.tensor([1]), torch.tensor([0], device=pool.device)
        scratch = torch.zeros((1, 1), dtype=torch.int32, device=pool.device)
        self.begin(StepBatch(True, [1], [1], scratch, first, one, one), [0])

    def begin(self, step: StepBatch, requests: list[int]) -> None:
        spec, device = self._pool.specs[0], self._pool.device
        layout = paged_layout(step, requests, page_size=self._pool.page_size)
        at = upload(layout.at, device)
        indices = step.page_table[step.slots[at[0]], at[1]]
        self._plans.append(self._plans.pop(0))
        self._plans[-1].make(
            self._pinned(layout.qo_indptr),
            self._pinned(layout.kv_indptr),
            indices,
            self._pinned(layout.last_page_lens),
            self._num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self._pool.page_size,
            causal=True,
            sm_scale=spec.head_dim**-0.5,
            q_data_type=DTYPES[spec.dtype],
            kv_data_type=DTYPES[spec.dtype],
            seq_lens=self._pinned(layout.kv_lens),
            disable_split_kv=True,
        )
        self._rows = None
        if len(requests) < len(step.q_lens):
            spans = step.spans()
            self._rows = upload(torch.cat([torch.arange(*spans[i]) for i in requests]), device)

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Fill the requests' rows of `out` [T, heads, dim]."""
        wrapper, cache = self._plans[-1].wrapper, (self._pool.k(layer), self._pool.v(layer))
        if self._rows is None:
            wrapper.run(q, cache, out=out)
        else:
            out.index_copy_(0, self._rows, wrapper.run(q[self._rows], cache))

    def _pinned(self, x: torch.Tensor) -> torch.Tensor:
        return x.pin_memory() if self._pool.device.type == "cuda" else x
