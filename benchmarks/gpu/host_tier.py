"""The hierarchical cache's copies: the same bytes layer by layer, and the same tokens from the host as computed."""

from typing import Any

import torch

from benchmarks.gpu.engine import Run
from benchmarks.gpu.target import Target
from engine.build import EngineParts, build_engine
from engine.config import EngineConfig
from engine.core.plan import PageCopy, Plan, PlanItem
from engine.kv.cache_spec import CacheSpec
from engine.kv.host_pool import HostPool
from engine.kv.kv_pool import KVPool
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config

PAGE_SIZE = 16


def measure(target: Target) -> dict[str, Any]:
    """Raises where bytes or tokens differ."""
    return {"bytes_mb": _bytes_mb(target), **_tokens(target)}


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


def _tokens(target: Target) -> dict[str, Any]:
    """Prompts whose prefixes the device cannot hold together, twice: with the host tier, and without any cache."""
    families, length, new_tokens = target.pick((8, 1000, 8), (6, 40, 4))
    prompts = [[16 + (31 * f + t * (f + 3)) % 200 for t in range(length)] for f in range(families)] * 2
    flags = {"max_total_tokens": target.pick(4096, 128), "max_running_requests": 2}
    tokens, counters = {}, {}
    ways: dict[str, dict[str, Any]] = {
        "no cache": {"disable_radix_cache": True},
        "at admission": {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_load_ahead_mb": 0},
        "ahead": {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_load_ahead_mb": 64},
    }
    for way, more in ways.items():
        parts = _engine(target, **flags, **more)
        run = Run(parts, depth=2)
        for i, prompt in enumerate(prompts):
            run.add(str(i), prompt=prompt, new_tokens=new_tokens)
        run.drain()
        host = parts.scheduler.memory.host
        counters[way] = {} if host is None else dict(host.counters)
        parts.device.executor.close()
        tokens[way] = run.tokens
    different = [way for way in ways if tokens[way] != tokens["no cache"]]
    assert not different, f"other tokens than without a cache: {', '.join(different)}"
    assert counters["at admission"]["hicache_loaded_pages"] and counters["ahead"]["hicache_loaded_ahead_pages"], (
        counters
    )
    return {way: counters[way] for way in ways if counters[way]}


def _engine(target: Target, **flags: Any) -> EngineParts:
    config = EngineConfig(
        model_path=DEFAULT_MODEL_PATH,
        dtype="float32",
        device=target.device.type,
        page_size=PAGE_SIZE,
        attention_backend=target.pick("triton", "torch"),
        **flags,
    )
    return build_engine(
        config,
        load_model_config(DEFAULT_MODEL_PATH),
        progress=False,
        capture=None,
    )
