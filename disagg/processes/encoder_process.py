"""The scheduler process of an encoder worker: a vision tower in an engine's loop."""

import os
import time
from functools import partial
from typing import Any

from disagg.config import SchedulerSpec
from disagg.fabric_pool import kv_bytes_of
from disagg.features.feature_transfers import encode_role
from disagg.processes.children import end_by_parent
from disagg.processes.transfer_machine import why_kv_stays
from engine.core_parts import EngineUse
from engine.device.machine import machine_facts
from engine.encoder import EncoderParts, build_encoder
from engine.executor.profiler import TorchProfiler
from engine.ipc import IpcPaths
from engine.loop.heartbeat import IterationClock, Watchdog
from engine.loop.loop import EngineLoop
from engine.loop.pipeline import Pipeline, StepStrategy
from engine.loop.ports import SocketPorts
from engine.loop.services import LoopServices, LoopSettings
from engine.messages import SchedulerReady
from engine.model_files.model_config import ModelConfig
from service.process.start import spare_what_lives


def serve_encoder(spec: SchedulerSpec, turns: IterationClock, model: ModelConfig, protocol: str | None) -> None:
    """Load the tower, send `SchedulerReady`, serve. `protocol` is Mooncake's.

    Raises ConfigError and BackendUnavailable.
    """
    started_s = time.monotonic()
    ports = SocketPorts(IpcPaths(spec.ipc_dir, spec.dp_rank), num_frontends=spec.num_frontends)
    use = EngineUse(kv_stays=why_kv_stays(spec.disagg), allocate_kv=kv_bytes_of(protocol))
    parts = build_encoder(spec.engine, model, use=use, progress=spec.progress)
    role = encode_role(spec, parts, wakeup=ports.call_attention)
    loop = EngineLoop(
        scheduler=parts.scheduler,
        pipeline=partial(Pipeline, strategy=StepStrategy(parts.scheduler), executor=parts.executor, depth=parts.depth),
        role=role,
        ports=ports,
        services=LoopServices(
            weights=parts.weights,
            kv=parts.kv,
            memory=parts.memory,
            profiler=TorchProfiler(parts.executor.call, name=spec.trace_name(0)),
            name=spec.trace_name(0),
        ),
        turns=turns,
        settings=LoopSettings(eos_ids=frozenset(), log_interval=parts.config.decode_log_interval),
        clock=time.monotonic,
    )
    watchdog = Watchdog(turns)
    end_by_parent(loop, ports.call_attention)
    spare_what_lives()
    turns.loaded()
    ports.to_frontend(SchedulerReady(_facts(parts, load_time_s=time.monotonic() - started_s) | role.info()))
    watchdog.start()
    try:
        loop.run()
    finally:
        watchdog.close()
        role.close()
        parts.executor.close()
        ports.close()


def _facts(parts: EncoderParts, *, load_time_s: float) -> dict[str, Any]:
    """Facts for /server_info."""
    allocator, config = parts.scheduler.memory.allocator, parts.config
    return {
        "max_total_num_tokens": allocator.num_pages * allocator.page_size,
        "num_pages": allocator.num_pages,
        "page_bytes": parts.pool.page_bytes,
        "page_size": allocator.page_size,
        "rank_pids": [os.getpid()],
        "device": config.device,
        "dtype": config.dtype,
        "stream": config.stream,
        "overlap_depth": parts.depth,
        "max_prefill_tokens": config.max_prefill_tokens,
        "max_running_requests": config.max_running_requests,
        "vlm_cache_size_mb": config.vlm_cache_size_mb,
        **{f"memory_{name}_bytes": size for name, size in parts.memory.items()},
        "load_time_s": round(load_time_s, 3),
        "kv_events_config": None,
        **machine_facts(config.device, config.dtype),
    }
