"""The scheduler process of an encoder worker: a vision tower in an engine's loop."""

import time

from disagg.config import SchedulerSpec
from disagg.feature_transfers import encode_role
from disagg.processes.serving import common_facts, serve
from disagg.transfer_engine import engine_use
from engine.assembly.encoder import build_encoder
from engine.assembly.worker import Clock, WorkerWire, assemble_worker, computing
from engine.executor.profiler import TorchProfiler
from engine.ipc import IpcPaths
from engine.loop.heartbeat import IterationClock
from engine.loop.loop import SocketPorts
from engine.loop.services import LoopServices, LoopSettings
from engine.model_files.model_config import ModelConfig


def serve_encoder(spec: SchedulerSpec, turns: IterationClock, model: ModelConfig) -> None:
    """Raises ConfigError and BackendUnavailable."""
    started_s = time.monotonic()
    ports = SocketPorts(IpcPaths(spec.ipc_dir, spec.dp_rank), num_frontends=spec.num_frontends)
    use = engine_use(spec.disagg, name=spec.trace_name(0))
    parts = build_encoder(spec.engine, model, use=use, progress=spec.progress)
    role = encode_role(spec, parts, wakeup=ports.call_attention)
    services = LoopServices(
        weights=parts.weights,
        trainers=parts.trainers,
        kv=parts.kv,
        memory=parts.memory,
        profiler=TorchProfiler(parts.executor.call, name=use.name),
        name=use.name,
    )
    loop = assemble_worker(
        LoopSettings(eos_ids=frozenset(), log_interval=parts.config.decode_log_interval),
        WorkerWire(ports=ports, role=role),
        Clock(turns=turns),
        computing(parts.scheduler, parts.executor, services, depth=parts.depth),
    )
    own = {"vlm_cache_size_mb": parts.config.vlm_cache_size_mb}
    facts = common_facts(parts, started_s=started_s) | own | role.info()
    closes = [role.close, parts.executor.close]
    serve(spec, loop, ports, turns, facts=facts, closes=closes)
