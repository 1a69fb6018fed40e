"""The copies of the hierarchical cache on a GPU: the bytes that cross, and the tokens. Times nothing."""

from typing import Any

import torch

from benchmarks.gpu.target import Target
from benchmarks.gpu.tokens import tokens_of
from engine.core.mem_cache.host_cache import HostCache
from engine.core.plan import PageCopy, Plan, PlanItem
from engine.kv.cache_spec import CacheSpec
from engine.kv.host_pool import HostPool
from engine.kv.kv_pool import KVPool
from engine.model_files.model_config import DEFAULT_MODEL_PATH

PAGE_SIZE = 16


def host_tier(target: Target) -> dict[str, Any]:
    """The copies of the hierarchical cache: the same bytes layer by layer, and the same tokens from the host as computed."""
    return {"bytes_mb": _bytes_mb(target), **_host_tokens(target)}


def _bytes_mb(target: Target) -> float:
    """Copy random pages out, then back to other pages; look at each layer as soon as it has been waited for."""
    spec, layers, num_pages = target.pick(
        (CacheSpec(8, 128, "bfloat16"), 36, 256), (CacheSpec(2, 16, "bfloat16"), 3, 8)
    )
    pool = KVPool([spec] * layers, num_pages=num_pages, page_size=PAGE_SIZE, device=target.device)
    host = HostPool(pool, num_pages=num_pages // 2)
    pool.buffer.view(torch.int64).random_()
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)) + 1
    left, came = order[: num_pages // 2].tolist(), order[num_pages // 2 :].tolist()
    host.copy(1, out=[PageCopy(page, i) for i, page in enumerate(left)], back=[])
    was = pool.buffer.clone()
    item = PlanItem("r", 0, [1], len(came) * PAGE_SIZE, 0, came, sample=True, output_len=0, extend=True)
    back = [PageCopy(page, i) for i, page in enumerate(came)]
    arrival = host.begin(Plan(seq=2, extend=True, items=[item], from_host=back))
    pages, expected = pool.buffer.view(1 + num_pages, -1), was.view(1 + num_pages, -1)[left]
    ends = pool.layer_ends()
    same = []
    for layer, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        arrival.hold(layer)
        same.append((pages[came, begin:end] == expected[:, begin:end]).all())
    target.sync()
    host.wait(2)
    different = [layer for layer, equal in enumerate(same) if not bool(equal)]
    host.close()
    assert arrival.is_held and not different, f"layers that did not come back as they left: {different}"
    return len(back) * pool.page_bytes / 1e6


def _host_tokens(target: Target) -> dict[str, Any]:
    """Prompts whose prefixes the device cannot hold together, twice: with the host tier, and without any cache."""
    count, length, new_tokens = target.pick((8, 1000, 8), (6, 40, 4))
    prompts = [[16 + (31 * f + t * (f + 3)) % 200 for t in range(length)] for f in range(count)] * 2
    flags = {"max_total_tokens": target.pick(4096, 128), "max_running_requests": 2, "page_size": PAGE_SIZE}
    flags |= {"device": target.device.type, "attention_backend": target.pick("triton", "torch")}
    tier: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
    ways: dict[str, dict[str, Any]] = {
        "no cache": {"disable_radix_cache": True},
        "at admission": {**tier, "ahead_pages": 0},
        "ahead": {**tier, "ahead_pages": 100},
    }
    tokens, counters = {}, {}
    for way, more in ways.items():
        tokens[way], parts = tokens_of(DEFAULT_MODEL_PATH, prompts, new_tokens, **flags, **more)
        host = parts.scheduler.memory.part(HostCache)
        counters[way] = {} if host is None else dict(host.counted)
    different = [way for way in ways if tokens[way] != tokens["no cache"]]
    assert not different, f"other tokens than without a cache: {', '.join(different)}"
    loaded = counters["at admission"]["hicache_loaded_pages"], counters["ahead"]["hicache_loaded_ahead_pages"]
    assert all(loaded), counters
    return {way: counters[way] for way in ways if counters[way]}
