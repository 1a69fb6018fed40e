"""Runs a router in one or several processes (parts: compose/)."""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import uvloop

from router.compose.exposure import check_exposure, limits_of
from router.compose.router import Router
from router.compose.routes import make_app
from router.config import RouterConfig, check_config
from router.fleet import ProcessSlot, obey_parent, run_fleet
from service.http.errors import RequestLimits
from service.http.listening import open_port
from service.http.server import HttpServer
from service.process.files import write_ready_file
from service.process.start import allow_many_files, spare_what_lives
from service.process.stop_signals import StopSignals
from service.telemetry.context import set_up_logging

SHUTDOWN_TIMEOUT_S = 3.0  # for last answers at the end

log = logging.getLogger(__name__)


def serve(config: RouterConfig, *, on_ready: Callable[[str], None] | None = None) -> None:
    set_up_logging(level=config.log_level, format=config.log_format, process="router")
    allow_many_files()
    if config.workers == 1:
        return uvloop.run(run_router(config, on_ready=on_ready))
    check_config(config)
    check_exposure(config)
    return run_fleet(config, serve_in_slot, on_ready=lambda url: _report_ready(config, url, on_ready))


def serve_in_slot(slot: ProcessSlot, config: RouterConfig) -> None:
    set_up_logging(level=config.log_level, format=config.log_format, process="router")
    uvloop.run(run_router(replace(config, ready_file=str(slot.ready_file)), slot=slot))


async def run_router(
    config: RouterConfig, *, on_ready: Callable[[str], None] | None = None, slot: ProcessSlot | None = None
) -> None:
    """Run until SIGTERM (drain), SIGINT or a second signal (at once), or cancellation.

    `on_ready(url)` when it listens. ConfigError for bad flags.
    """
    signals = StopSignals()
    if slot is not None:
        obey_parent(on_drain=signals.requested.set, on_end=signals.on_sigint)
    async with start_router(config, slot=slot) as router:
        with signals.caught(on_hangup=lambda: router.gate.reload(time.monotonic()), only_hangup=slot is not None):
            spare_what_lives()
            _report_ready(config, router.url, on_ready)
            await signals.requested.wait()
            await router.live.drain(timeout_s=config.drain_timeout_s, at_once=signals.at_once)


@asynccontextmanager
async def start_router(
    config: RouterConfig, *, slot: ProcessSlot | None = None, limits: RequestLimits | None = None
) -> AsyncIterator[Router]:
    check_config(config)
    async with AsyncExitStack() as stack:
        router = Router(config, slot, stack)
        await router.connect(stack)
        limits = limits or limits_of(config)
        server = HttpServer(make_app(router, limits), limits, shutdown_timeout_s=SHUTDOWN_TIMEOUT_S)
        stack.push_async_callback(server.close)  # ends first: no new connections, waits for running requests
        if slot is not None:  # before reading the pool, so that no change is missed
            await server.serve_unix(slot.socket(slot.row))
            await router.peers.catch_up(router.table, now_s=time.monotonic())
        port = stack.enter_context(open_port(config.host, config.port, shared=slot is not None))
        await server.serve(port)
        router.url = port.url
        if router.secret is None and config.failover_max:
            log.info("no --cluster-secret-file: when a worker dies its answers end, as no other worker continues them")
        for worker in router.table.workers():
            router.monitor.watch(worker)
        await router.monitor.first_round()
        if router.discovery is not None:
            router.discovery.start()
        elif not router.table.workers():
            log.info("no workers yet: name them by --prefill and --decode or --worker-urls, or by POST /workers")
        router.auto_roles.start()
        yield router


def _report_ready(config: RouterConfig, url: str, on_ready: Callable[[str], None] | None) -> None:
    write_ready_file(config.ready_file, {"router": url})
    if on_ready is not None:
        on_ready(url)
