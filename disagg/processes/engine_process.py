"""The scheduler process of a worker that computes prompts or decodes: its assembly."""

import os
import time
from functools import partial
from typing import Any

from disagg.compose import make_role
from disagg.config import SchedulerSpec
from disagg.processes.serving import common_facts, publisher_of, serve
from disagg.transfer_engine import engine_use
from engine.assembly.leader import build_engine
from engine.assembly.parts import EngineParts
from engine.assembly.services import loop_services
from engine.assembly.steps import LoopSteps, joint_steps, loop_steps
from engine.assembly.worker import Clock, Computing, WorkerWire, assemble_worker
from engine.device.step_memory import LocalMachine
from engine.flags.nodes import leader_of
from engine.ipc import IpcPaths
from engine.loop.heartbeat import IterationClock
from engine.loop.loop import SocketPorts
from engine.loop.services import LoopSettings
from engine.model_files.model_config import ModelConfig
from engine.ranks.group import Group
from engine.text.tokenizer import load_tokenizer


def serve_engine(spec: SchedulerSpec, turns: IterationClock, model: ModelConfig, group: Group | None) -> None:
    """Raises ConfigError and BackendUnavailable."""
    started_s, name = time.monotonic(), spec.trace_name(leader_of(spec.engine))
    tokenizer = None if spec.engine.skip_tokenizer_init else load_tokenizer(spec.engine.model_path)
    attention = None if spec.joint is None else spec.joint.wakes[spec.dp_rank]
    ports = SocketPorts(IpcPaths(spec.ipc_dir, spec.dp_rank), num_frontends=spec.num_frontends, attention=attention)
    use = engine_use(spec.disagg, pp_size=spec.engine.pp_size, name=name)
    machine, wakeup = LocalMachine(progress=spec.progress), ports.call_attention
    parts = build_engine(spec.engine, model, use=use, machine=machine, wakeup=wakeup, group=group)
    publisher, steps = publisher_of(spec, parts.events), _steps(spec, parts)
    services = loop_services(parts, steps, ports, tokenizer=tokenizer, events=publisher, name=name)
    role = make_role(spec, parts, wakeup=wakeup)
    loop = assemble_worker(
        LoopSettings(
            eos_ids=frozenset(parts.model.eos_token_ids),
            stream_interval=parts.config.stream_interval,
            log_interval=parts.config.decode_log_interval,
        ),
        WorkerWire(ports=ports, role=role),
        Clock(turns=turns),
        Computing(scheduler=parts.scheduler, pipeline=steps.pipeline, services=services),
    )
    if parts.compiles is not None:
        parts.compiles.serve()
    owners = (services.grammars, parts.storage, publisher, role, parts.executor)
    facts = _facts(parts, common_facts(parts, publisher, started_s=started_s)) | role.info()
    closes = [owner.close for owner in owners if owner is not None]
    serve(spec, loop, ports, turns, group, facts=facts, closes=closes)


def _steps(spec: SchedulerSpec, parts: EngineParts) -> LoopSteps:
    if spec.joint is None:
        return loop_steps(parts)
    wakes = {rank: partial(os.eventfd_write, wake, 1) for rank, wake in enumerate(spec.joint.wakes)}
    return joint_steps(parts, spec.dp_rank, wakes)


def _facts(parts: EngineParts, common: dict[str, Any]) -> dict[str, Any]:
    config, group = parts.config, parts.group
    pids = {} if group is None else {"rank_pids": [pid for _, pid in sorted(group.pids.items())]}
    return {
        **common,
        **pids,
        "tp_size": config.tp_size,
        "pp_size": config.pp_size,
        "kv_cache_dtype": config.kv_cache_dtype,
        "kv_behind_windows": parts.behind_windows,
        "hicache_storage": None if parts.storage is None else parts.storage.place,
        "grammar_backend": config.grammar_backend,
        "context_length": config.context_length,
        "chunked_prefill_size": config.chunked_prefill_size,
        "mem_fraction_static": config.mem_fraction_static,
    }
