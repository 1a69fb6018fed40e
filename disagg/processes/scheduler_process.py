"""A worker's scheduler process, the only one with torch: builds engine and role, runs the loop.

Exit status: 0 ended by its parent; OPERATING_ERROR with a line on stderr; else a bug.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from disagg.config import DisaggConfig, SchedulerSpec, read_secret
from disagg.processes.children import OPERATING_ERROR, end_by_parent
from disagg.processes.transfer_machine import check_flags, check_transfer_machine, why_kv_stays
from engine.config import EngineConfig
from engine.core.dp_step import UpdateAgreement
from engine.flags.kv_events_config import parse_kv_events_config
from engine.flags.nodes import leader_of
from engine.flags.resolve import agreement_of
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.queue import GrammarQueue
from engine.grammar.reasoning import ReasoningGates
from engine.ipc import IpcPaths
from engine.loop.adapter_control import AdapterControl
from engine.loop.heartbeat import HeartbeatResponder, IterationClock, Watchdog, dump_of_others, end_with_stacks
from engine.loop.kv_events import ZmqPublisher
from engine.loop.loop import EngineLoop
from engine.loop.ports import SocketPorts
from engine.loop.services import LoopServices, LoopSettings
from engine.lora.peft_config import named_paths
from engine.messages import SchedulerReady
from engine.model_files.model_config import ModelConfig, load_model_config
from engine.parallel.rendezvous import LOST_S
from engine.text.incremental import MakeStops, no_stops, stops_of
from engine.text.tokenizer import Tokenizer, load_tokenizer
from service.flags import ConfigError
from service.process.start import no_collections, spare_what_lives
from service.telemetry.context import set_up_logging
from transfer_backends.contract import BackendUnavailable, EngineError
from transfer_backends.engines.mooncake import protocol_here

if TYPE_CHECKING:
    from engine.build import EngineParts
    from engine.core_parts import EngineUse
    from engine.loop_steps import LoopSteps
    from engine.ranks.group import Group
    from engine.ranks.shared_board import SharedBoard

NAMED_WITHIN_S = 5.0  # the parent looks at its children more often

log = logging.getLogger(__name__)


def run(spec: SchedulerSpec) -> None:
    """Load, send `SchedulerReady`, serve. Raises ConfigError and BackendUnavailable."""
    turns = IterationClock(limit_s=spec.engine.watchdog_timeout_s, now_s=time.monotonic())
    heartbeat = HeartbeatResponder(IpcPaths(spec.ipc_dir, spec.dp_rank), turns, name=spec.process)
    heartbeat.start()
    try:
        _run(spec, turns)
    finally:
        heartbeat.close()


def _run(spec: SchedulerSpec, turns: IterationClock) -> None:
    protocol = _check_transfers(spec)
    with no_collections():
        from disagg.processes.rank_group import started_group  # torch comes in here, after the flags have been read

    model = load_model_config(spec.engine.model_path)
    if spec.disagg.disaggregation_mode == "encode":
        _serve_encoder(spec, turns, model, protocol)
        return
    check_prefix_fetch(spec, model)
    check_feature_fetch(spec, model)
    with started_group(spec, model, mooncake_protocol=protocol) as group:
        _serve(spec, turns, model, protocol, group)


def _serve_encoder(spec: SchedulerSpec, turns: IterationClock, model: ModelConfig, protocol: str | None) -> None:
    with no_collections():
        from disagg.processes.encoder_process import serve_encoder

    serve_encoder(spec, turns, model, protocol)


def _serve(
    spec: SchedulerSpec, turns: IterationClock, model: ModelConfig, protocol: str | None, group: "Group | None"
) -> None:
    with no_collections():
        from disagg.compose import make_role
        from engine.build import build_engine
        from engine.kernels.build import RanksEnded

    started_s = time.monotonic()
    tokenizer = None if spec.engine.skip_tokenizer_init else load_tokenizer(spec.engine.model_path)
    ports = SocketPorts(
        IpcPaths(spec.ipc_dir, spec.dp_rank),
        num_frontends=spec.num_frontends,
        attention=None if spec.joint is None else spec.joint.wakes[spec.dp_rank],
    )
    parts = build_engine(
        spec.engine,
        model,
        use=_engine_use(spec.disagg, protocol, pp_size=spec.engine.pp_size),
        wakeup=ports.call_attention,
        progress=spec.progress,
        group=group,
    )
    if spec.engine.enable_hierarchical_cache and spec.disagg.disaggregation_mode == "decode":
        log.info("--enable-hierarchical-cache has no effect in the decode role: peers write pages outside stream order")
    adapters = _load_adapters(parts, ports)
    publisher = _publisher(spec, parts)
    role = make_role(spec, parts, wakeup=ports.call_attention)
    grammars = make_grammar_queue(parts.config, model, tokenizer, wakeup=ports.call_attention)
    steps = _steps(spec, parts)
    stops = no_stops if tokenizer is None else partial(stops_of, tokenizer)
    services = _services(spec, parts, adapters, grammars=grammars, stops=stops, publisher=publisher, steps=steps)
    loop = EngineLoop(
        scheduler=parts.scheduler,
        pipeline=steps.pipeline,
        role=role,
        ports=ports,
        services=services,
        turns=turns,
        settings=_loop_settings(parts),
        clock=time.monotonic,
    )
    watchdog = Watchdog(turns) if group is None else Watchdog(turns, on_stall=partial(_end_with_late_ranks, group))
    end_by_parent(loop, ports.call_attention)
    spare_what_lives()
    if parts.compiles is not None:
        parts.compiles.serve()
    turns.loaded()
    facts = _facts(parts, publisher, load_time_s=time.monotonic() - started_s)
    ports.to_frontend(SchedulerReady(facts | role.info()))
    watchdog.start()
    try:
        loop.run()
    except RanksEnded:
        if spec.joint is not None:
            _await_parent(loop, ports)
            return
        if parts.group is not None:
            parts.group.followers.await_end(2 * LOST_S)
        raise
    finally:
        grammars.close()
        watchdog.close()
        if parts.disk is not None:
            parts.disk.close()
        if publisher is not None:
            publisher.close()
        role.close()
        parts.executor.close()
        ports.close()


def _check_transfers(spec: SchedulerSpec) -> str | None:
    """Return Mooncake's protocol, if used. Raises ConfigError and BackendUnavailable.

    Runs before torch is imported (with `--device`) or the model is loaded, which may take minutes.
    """
    disagg = spec.disagg
    if not disagg.has_peers:
        return None
    check_flags(disagg)
    if disagg.disaggregation_transfer_backend == "fake":
        return None
    on_gpu = spec.engine.device == "cuda" or (spec.engine.device == "auto" and _has_gpu())
    check_transfer_machine(disagg, os.environ, on_gpu=on_gpu)
    if disagg.disaggregation_transfer_backend != "mooncake":
        return None
    return protocol_here(disagg.disaggregation_mooncake_protocol, device=0 if on_gpu else None)


def check_prefix_fetch(spec: SchedulerSpec, model: ModelConfig) -> None:
    """Raises ConfigError for flags or models without prefix transfer."""
    if not spec.disagg.prefix_fetch or spec.disagg.disaggregation_mode == "null":
        return
    if model.recurrent is not None:
        raise ConfigError(
            "--prefix-fetch: the model has recurrent layers, whose state no prefix of another worker brings along; leave it out"
        )
    if spec.engine.disable_radix_cache:
        raise ConfigError(
            "--prefix-fetch: --disable-radix-cache leaves no place for a prefix; leave one of the two out"
        )
    if spec.engine.dp_size > 1:
        raise ConfigError(
            f"--prefix-fetch: not with --dp-size {spec.engine.dp_size}: a router does not know which DP rank has a prefix"
        )


def check_feature_fetch(spec: SchedulerSpec, model: ModelConfig) -> None:
    """Raises ConfigError for models without features; warns if this worker cannot fetch."""
    if not spec.disagg.feature_fetch:
        return
    if model.vision is None:
        raise ConfigError("--feature-fetch: the model sees no images; leave it out")
    if spec.engine.pp_size > 1:
        log.warning(
            "--feature-fetch: not with --pp-size %d, whose first stage alone needs features of images and has no transfers of its own; "
            "this worker encodes all images itself",
            spec.engine.pp_size,
        )


def _has_gpu() -> bool:
    with no_collections():
        import torch

    return torch.cuda.is_available()


def _load_adapters(parts: "EngineParts", ports: SocketPorts) -> AdapterControl:
    """Load the flags' adapters. Raises ConfigError."""
    adapters = AdapterControl(
        store=parts.adapters,
        max_loaded=parts.config.max_loaded_loras,
        forget_prefixes_of=parts.scheduler.memory.cache.forget,
        reply=ports.to_frontend,
        wakeup=ports.call_attention,
    )
    for name, path in named_paths(parts.config.lora_paths).items():
        adapters.load_now(name, path)
    return adapters


def _services(
    spec: SchedulerSpec,
    parts: "EngineParts",
    adapters: AdapterControl,
    *,
    grammars: GrammarQueue,
    stops: MakeStops,
    publisher: ZmqPublisher | None,
    steps: "LoopSteps",
) -> LoopServices:
    from engine.executor.profiler import TorchProfiler
    from engine.ranks.group import GroupProfiler

    compiles = parts.compiles
    name = spec.trace_name(leader_of(spec.engine))
    profiler = TorchProfiler(parts.device.executor.call, name=name)
    return LoopServices(
        weights=parts.weights,
        kv=parts.kv,
        memory=parts.memory,
        profiler=profiler if parts.group is None else GroupProfiler(profiler, parts.group.followers),
        grammars=grammars,
        stops=stops,
        adapters=adapters,
        disk=parts.disk,
        events=publisher,
        gauges=steps.gauges,
        expert_loads=parts.executor.runner.expert_loads,
        name=name,
        late_compiles=lambda: 0 if compiles is None else compiles.num_late,
        updates=steps.updates,
        listeners=steps.listeners,
    )


def _board(spec: SchedulerSpec, parts: "EngineParts") -> "SharedBoard | None":
    if spec.joint is None:
        return None
    from engine.ranks.shared_board import SharedBoard

    assert parts.group is not None and parts.group.joint is not None
    wakes = {rank: partial(os.eventfd_write, wake, 1) for rank, wake in enumerate(spec.joint.wakes)}
    return SharedBoard(parts.group.joint.region, rank=spec.dp_rank, wakes=wakes)


def _steps(spec: SchedulerSpec, parts: "EngineParts") -> "LoopSteps":
    from engine.loop_steps import loop_steps

    board = _board(spec, parts)
    if board is None:
        return loop_steps(parts)
    decodes_only = spec.disagg.disaggregation_mode == "decode"
    agreement = agreement_of(parts.config, board, spec.dp_rank, decodes_only=decodes_only)
    steps = loop_steps(parts, agreement=agreement)
    return replace(steps, updates=UpdateAgreement(board, rank=spec.dp_rank))


def _loop_settings(parts: "EngineParts") -> LoopSettings:
    return LoopSettings(
        eos_ids=frozenset(parts.model.eos_token_ids),
        stream_interval=parts.config.stream_interval,
        log_interval=parts.config.decode_log_interval,
    )


def _facts(parts: "EngineParts", publisher: ZmqPublisher | None, *, load_time_s: float) -> dict[str, Any]:
    from engine.device.machine import machine_facts

    allocator, config = parts.scheduler.memory.allocator, parts.config
    return {
        "max_total_num_tokens": allocator.num_pages * allocator.page_size,
        "num_pages": allocator.num_pages,
        "page_bytes": parts.pool.page_bytes,
        "page_size": allocator.page_size,
        "tp_size": config.tp_size,
        "pp_size": config.pp_size,
        "rank_pids": [os.getpid()] if parts.group is None else [pid for _, pid in sorted(parts.group.pids.items())],
        "device": config.device,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "kv_behind_windows": parts.behind_windows,
        "grammar_backend": config.grammar_backend,
        "stream": config.stream,
        "overlap_depth": parts.depth,
        "context_length": config.context_length,
        "chunked_prefill_size": config.chunked_prefill_size,
        "max_prefill_tokens": config.max_prefill_tokens,
        "max_running_requests": config.max_running_requests,
        "mem_fraction_static": config.mem_fraction_static,
        **{f"memory_{name}_bytes": size for name, size in parts.memory.items()},
        "load_time_s": round(load_time_s, 3),
        "kv_events_config": None if publisher is None else publisher.describe(),
        **machine_facts(config.device, config.dtype),
    }


def _publisher(spec: SchedulerSpec, parts: "EngineParts") -> ZmqPublisher | None:
    """Raises ConfigError for a taken address."""
    config = parse_kv_events_config(spec.engine.kv_events_config)
    if config is None:
        return None
    secret = read_secret(spec.disagg.cluster_secret_file)
    if spec.engine.dp_size == 1:
        return ZmqPublisher(config, events=parts.events, secret=secret)
    return ZmqPublisher(config.of_rank(spec.dp_rank), events=parts.events, secret=secret, dp_rank=spec.dp_rank)


def make_grammar_queue(
    config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer | None, *, wakeup: Callable[[], None]
) -> GrammarQueue:
    """`config` is resolved."""
    assert config.max_running_requests is not None and config.grammar_backend is not None, "resolved"
    compiler = None
    if config.grammar_backend != "none":
        assert tokenizer is not None, "checked (engine/flags/tokenizer.py)"
        compiler = GrammarCompiler(
            tokenizer,
            vocab_size=model.vocab_size,
            eos_ids=model.eos_token_ids,
            any_whitespace=not config.constrained_json_disable_any_whitespace,
        )
    return GrammarQueue(
        compiler,
        gates=None if tokenizer is None else ReasoningGates(tokenizer, vocab_size=model.vocab_size),
        vocab_size=model.vocab_size,
        eos_ids=model.eos_token_ids,
        wakeup=wakeup,
        max_waiting=config.max_queued_requests + config.max_running_requests,
    )


def _engine_use(disagg: DisaggConfig, protocol: str | None, *, pp_size: int = 1) -> "EngineUse":
    """Mooncake's `protocol` may need special memory."""
    from disagg.fabric_pool import kv_bytes_of
    from engine.core_parts import EngineUse

    decode = disagg.disaggregation_mode == "decode"
    return EngineUse(
        decodes=disagg.disaggregation_mode != "prefill",
        prefills=not decode,
        peers_write_pages=decode,
        kv_stays=why_kv_stays(disagg),
        retracted_kv=disagg.disaggregation_decode_retraction_backup if decode else "recompute",
        reserve_floor=disagg.num_reserved_decode_tokens,
        allocate_kv=kv_bytes_of(protocol),
        receives_features=disagg.feature_fetch and not decode and pp_size == 1,
    )


def _end_with_late_ranks(group: "Group", stalled_s: float) -> None:
    late = group.late()
    dump_of_others(group.pids[rank] for rank in late if rank in group.pids and group.pids[rank] != os.getpid())
    end_with_stacks(stalled_s, found=f"waits for {group.late_text(late)}" if late else "")


def _await_parent(loop: EngineLoop, ports: SocketPorts) -> None:
    """With DP attention, wait for the parent to end this rank and name the one that ended first."""
    deadline_s = time.monotonic() + NAMED_WITHIN_S
    while not loop.stopped and (left_s := deadline_s - time.monotonic()) > 0:
        ports.wait(left_s)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m disagg.processes.scheduler_process", description="scheduler of one worker"
    )
    parser.add_argument("--spec-json", required=True, help="SchedulerSpec as JSON")
    spec = msgspec.json.decode(parser.parse_args(argv).spec_json, type=SchedulerSpec)
    set_up_logging(level=spec.log_level, format=spec.log_format, process=spec.process)
    try:
        run(spec)
    except (ConfigError, BackendUnavailable, EngineError) as error:
        print(f"tandem serve: error: {error}", file=sys.stderr, flush=True)
        return OPERATING_ERROR
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # transfer libraries keep threads that outlive a normal exit
