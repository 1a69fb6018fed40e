"""A worker's scheduler process, the only one with torch: checks what can be without, then serves.

Exit status: 0 ended by its parent; OPERATING_ERROR with a line on stderr; else a bug.
"""

import argparse
import os
import sys
import time
from contextlib import suppress

import msgspec

from disagg.config import SchedulerSpec
from disagg.processes.children import OPERATING_ERROR
from disagg.processes.transfer_machine import (
    check_feature_fetch,
    check_flags,
    check_prefix_fetch,
    check_transfer_machine,
)
from engine.ipc import IpcPaths
from engine.loop.heartbeat import HeartbeatResponder, IterationClock
from engine.model_files.model_config import load_model_config
from service.flags import ConfigError
from service.process.start import no_collections
from service.telemetry.context import set_up_logging
from transfer_backends.contract import BackendUnavailable, EngineError
from transfer_backends.engines.mooncake import protocol_here


def run(spec: SchedulerSpec) -> None:
    """Raises ConfigError and BackendUnavailable."""
    turns = IterationClock(limit_s=spec.engine.watchdog_timeout_s, now_s=time.monotonic())
    heartbeat = HeartbeatResponder(IpcPaths(spec.ipc_dir, spec.dp_rank), turns, name=spec.process)
    heartbeat.start()
    try:
        _run(spec, turns)
    finally:
        heartbeat.close()


def _run(spec: SchedulerSpec, turns: IterationClock) -> None:
    _check_transfers(spec)
    with no_collections():
        from disagg.processes.encoder_process import serve_encoder  # torch comes in here, after the flags were read
        from disagg.processes.engine_process import serve_engine
        from disagg.processes.rank_group import started_group

    model = load_model_config(spec.engine.model_path)
    if spec.disagg.disaggregation_mode == "encode":
        serve_encoder(spec, turns, model)
        return
    check_prefix_fetch(spec)
    check_feature_fetch(spec, model)
    with started_group(spec, model) as group:
        serve_engine(spec, turns, model, group)


def _check_transfers(spec: SchedulerSpec) -> None:
    """Raises ConfigError and BackendUnavailable.

    Runs before torch is imported (with `--device`) or the model is loaded.
    """
    disagg = spec.disagg
    if not disagg.has_peers:
        return
    check_flags(disagg)
    if disagg.disaggregation_transfer_backend == "fake":
        return
    on_gpu = spec.engine.device == "cuda" or (spec.engine.device == "auto" and _has_gpu())
    check_transfer_machine(disagg, os.environ, on_gpu=on_gpu)
    if disagg.disaggregation_transfer_backend == "mooncake":
        protocol_here(disagg.disaggregation_mooncake_protocol, device=0 if on_gpu else None)


def _has_gpu() -> bool:
    with no_collections():
        import torch

    return torch.cuda.is_available()


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
        with suppress(OSError):
            IpcPaths(spec.ipc_dir).reported_error.write_text(str(error))
        return OPERATING_ERROR
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # transfer libraries keep threads that outlive a normal exit
