"""One worker: this process serves HTTP; scheduler and detokenizer run beside it. Ends when told, or when one of them does."""

import asyncio
import json
import logging
import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import uvloop

from bootstrap_server.app import BootstrapServer
from bootstrap_server.config import BootstrapConfig
from disagg.children import Children
from disagg.config import DisaggConfig, role_name
from disagg.exposure import check_events_exposure, check_exposure, meeting_places
from disagg.scheduler_process import SchedulerSpec
from disagg.secret import read_secret
from engine.config import ConfigError, EngineConfig, ServerConfig
from engine.detokenizer.process import DetokenizerConfig
from engine.frontend.ipc import IpcPaths
from engine.frontend.server import FrontendAddress, WorkerDied, open_worker_gate, run_frontend
from engine.model_config import load_model_config
from engine.resolve import with_model_path
from telemetry.logs import set_up_logging

ANY_ADDRESS = ("0.0.0.0", "::", "")
PROGRESS_ENV = "TANDEM_PROGRESS"  # set by whoever reads our log to show a bar (`tandem up`)


def run_worker(*, engine: EngineConfig, server: ServerConfig, disagg: DisaggConfig) -> int:
    """Serve until SIGTERM (after a drain) or SIGINT; returns the exit status. Raises ConfigError before anything is started."""
    set_up_logging(level=server.log_level, format=server.log_format, process=role_name(disagg))
    engine = with_model_path(engine)
    load_model_config(engine.model_path)  # a broken checkpoint is told before processes are started
    if not server.drain_timeout >= 0:
        raise ConfigError(f"--drain-timeout: must be at least 0, got {server.drain_timeout:g}")
    if server.default_deadline is not None and not server.default_deadline > 0:
        raise ConfigError(f"--default-deadline: must be greater than 0, got {server.default_deadline:g}")
    control_host = _control_host(server, disagg)
    check_exposure(server, disagg, control_host=control_host)
    check_events_exposure(server, engine, disagg)
    meeting_places(server, disagg, control_host=control_host)  # wrong files and rules are told before anything starts
    open_worker_gate(server)
    bootstrap = _embedded_bootstrap_server(server, disagg)
    ipc, children = IpcPaths.create(), Children()
    signal.signal(signal.SIGTERM, _leave)  # until the frontend catches signals: what is begun is undone in order
    signal.signal(signal.SIGINT, _leave)
    try:
        if bootstrap is not None:
            _listen(bootstrap, disagg)
            disagg = replace(disagg, disaggregation_bootstrap_port=bootstrap.port)
        _start(children, ipc, engine=engine, server=server, disagg=disagg, control_host=control_host)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(children, ipc, engine=engine, server=server, disagg=disagg, control_host=control_host))
        return 0
    except WorkerDied as error:
        if not children.told():
            print(f"tandem serve: error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        _ignore_signals()  # the rest is bounded, and what it removes nobody else would
        children.end()
        ipc.remove()
        if bootstrap is not None:
            bootstrap.close()


def _leave(signum: int, frame: object) -> None:
    _ignore_signals()
    raise SystemExit(0)


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _start(
    children: Children,
    ipc: IpcPaths,
    *,
    engine: EngineConfig,
    server: ServerConfig,
    disagg: DisaggConfig,
    control_host: str,
) -> None:
    own = f"{control_host}:{disagg.disaggregation_bootstrap_port}"
    spec = SchedulerSpec(
        engine=engine,
        disagg=disagg,
        ipc_dir=ipc.dir,
        control_host=control_host,
        bootstrap=disagg.disaggregation_bootstrap_server or own,
        log_level=server.log_level,
        log_format=server.log_format,
        progress=sys.stderr.isatty() or PROGRESS_ENV in os.environ,
    )
    text = DetokenizerConfig(
        ipc_dir=ipc.dir, model_path=engine.model_path, log_level=server.log_level, log_format=server.log_format
    )
    threads = engine.num_threads
    children.start("scheduler", "disagg.scheduler_process", ["--spec-json", _json(spec)], num_threads=threads)
    children.start("detokenizer", "engine.detokenizer", ["--config-json", _json(text)], num_threads=1)


async def _serve(
    children: Children,
    ipc: IpcPaths,
    *,
    engine: EngineConfig,
    server: ServerConfig,
    disagg: DisaggConfig,
    control_host: str,
) -> None:
    await run_frontend(
        server=server,
        engine=engine,
        ipc=ipc,
        mode=disagg.disaggregation_mode,
        extra_info=asdict(disagg),
        default_bootstrap_port=disagg.disaggregation_bootstrap_port,
        on_ready=lambda address: _say_ready(address, server, disagg),
        children_alive=children.dead,
        meeting=meeting_places(server, disagg, control_host=control_host),
        drain_s=server.drain_timeout,
    )


def _say_ready(address: FrontendAddress, server: ServerConfig, disagg: DisaggConfig) -> None:
    logging.getLogger(__name__).info("serving at %s (%s)", address.url, disagg.disaggregation_mode)
    if server.ready_file is None:
        return
    text = json.dumps({"url": address.url, "role": disagg.disaggregation_mode, "pid": os.getpid()})
    partial = Path(f"{server.ready_file}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(server.ready_file)  # readers see all of it or nothing


def _control_host(server: ServerConfig, disagg: DisaggConfig) -> str:
    """The address that peers reach this worker at."""
    host = disagg.disaggregation_control_host or server.host
    if disagg.disaggregation_mode != "null" and host in ANY_ADDRESS:
        raise ConfigError(
            f"--host {server.host}: peers need one address of this worker; name it with --disaggregation-control-host"
        )
    return host


def _embedded_bootstrap_server(server: ServerConfig, disagg: DisaggConfig) -> BootstrapServer | None:
    """The one inside a prefill worker; None for the others, and where a server on its own is named."""
    if disagg.disaggregation_mode != "prefill" or disagg.disaggregation_bootstrap_server is not None:
        return None
    config = BootstrapConfig(host=server.host, port=disagg.disaggregation_bootstrap_port)
    return BootstrapServer(config, shared=False, secret=read_secret(disagg))


def _listen(bootstrap: BootstrapServer, disagg: DisaggConfig) -> None:
    try:
        bootstrap.start()
    except OSError as error:
        port = disagg.disaggregation_bootstrap_port
        raise ConfigError(f"--disaggregation-bootstrap-port {port}: {error.strerror or error}") from error


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
