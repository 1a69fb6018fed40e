"""One worker: HTTP, and a scheduler process per DP rank; ends on a signal or with a child."""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvloop

from disagg.config import DisaggConfig, role_name
from disagg.processes.node import run_node
from disagg.processes.rank_start import on_gpu
from disagg.processes.session_plan import SessionPlan, plan_session
from disagg.processes.sessions import run_sessions
from engine.config import EngineConfig, ServerConfig
from engine.flags.local_defaults import with_frontends, with_random_seed, with_threads
from engine.flags.model_source import with_local_model
from engine.frontend.spec import open_worker_gate
from service.http.listening import ListeningPort, open_port, open_shared_ports
from service.process.stop_signals import DRAIN, END
from service.telemetry.context import set_up_logging

log = logging.getLogger(__name__)

_ENDING = (signal.SIGTERM, signal.SIGINT, DRAIN, END)


def run_worker(*, engine: EngineConfig, server: ServerConfig, disagg: DisaggConfig) -> int:
    """Return the exit status. Raises ConfigError."""
    set_up_logging(level=server.log_level, format=server.log_format, process=role_name(disagg))
    seeded = with_random_seed(engine)
    needs_one = disagg.disaggregation_mode == "encode" or server.enable_early_rejection
    server = with_frontends(server, engine, needs_one=needs_one, on_gpu=on_gpu(engine))
    plan = plan_on_machine(engine=seeded, server=server, disagg=disagg)
    if engine.node_rank > 0:
        return undone_in_order(lambda: run_node(plan))
    gate = open_worker_gate(server)
    if seeded is not engine:
        log.info("--random-seed %d: drawn at start; give it to get the same samples again", seeded.random_seed)

    def serve() -> int:
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        with _open_ports(server) as ports, runner:
            return runner.run(run_sessions(plan, gate, ports))

    return undone_in_order(serve)  # for signals before the loop catches them


def plan_on_machine(*, engine: EngineConfig, server: ServerConfig, disagg: DisaggConfig) -> SessionPlan:
    """This machine decides seed, model files, threads. Raises ConfigError."""
    local = with_threads(with_local_model(with_random_seed(engine)))
    return plan_session(engine=local, server=server, disagg=disagg)


def undone_in_order(run: Callable[[], int]) -> int:
    """Turn signals into an exception, so that `run` undoes its start."""
    for number in _ENDING:
        signal.signal(number, _leave)
    try:
        return run()
    finally:
        _ignore_signals()


@contextmanager
def _open_ports(server: ServerConfig) -> Iterator[tuple[ListeningPort, ...]]:
    """Waiting connections survive a role switch."""
    if server.num_frontends == 1:
        with open_port(server.host, server.port) as port:
            yield (port,)
    else:
        with open_shared_ports(server.host, server.port, count=server.num_frontends) as ports:
            yield ports


def _leave(signum: int, frame: object) -> None:
    _ignore_signals()
    raise SystemExit(0)


def _ignore_signals() -> None:
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
