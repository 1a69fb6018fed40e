"""Runs a router, as one process or several: listens, and handles signals. What it is made of: compose.py."""

import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import uvloop
from aiohttp import web

from router.compose import Base, Serving, build_base, build_guard, build_routes, build_serving, check_exposure
from router.config import RouterConfig, check_config
from router.fleet.processes import ProcessSlot, obey_parent, run_fleet
from router.http.limits import limits_of
from service.http.listening import open_port
from service.http.server import make_runner
from service.process.collector import spare_what_lives
from service.process.open_files import allow_many_files
from service.process.stop_signals import StopSignals
from service.telemetry.logs import set_up_logging

log = logging.getLogger(__name__)


class RunningRouter:
    """A router that listens at `url`; its state, for tests and for the launcher."""

    def __init__(self, url: str, base: Base, serving: Serving) -> None:
        self.url = url
        self.table = base.table
        self.rooms = base.rooms
        self.gate = base.gate
        self.live = base.live
        self.recorder = base.recorder
        self.admission = base.admission
        self.monitor = serving.monitor


async def run_router(
    config: RouterConfig, *, on_ready: Callable[[str], None] | None = None, slot: ProcessSlot | None = None
) -> None:
    """Run until SIGTERM (drain), SIGINT or a second signal (end at once), or until cancelled. `on_ready(url)` is called once the router listens.

    `ConfigError` for a flag that cannot be honoured, a taken port included. It listens even when no worker is
    alive yet: requests are then answered 503, and /readiness says what is missing.
    """
    signals = StopSignals()
    if slot is not None:
        obey_parent(on_drain=signals.asked.set, on_end=signals.on_sigint)
    async with start_router(config, slot=slot) as router:
        with signals.caught(on_hangup=lambda: router.gate.reload(time.monotonic()), only_hangup=slot is not None):
            _tell_ready(config, router.url, on_ready)
            await signals.asked.wait()
            await router.live.drain(timeout_s=config.drain_timeout_s, at_once=signals.at_once)


def serve(config: RouterConfig, *, on_ready: Callable[[str], None] | None = None) -> None:
    """`run_router` on an event loop of its own (uvloop), or on several, each in a process (`--workers`)."""
    set_up_logging(level=config.log_level, format=config.log_format, process="router")
    allow_many_files()
    if config.workers == 1:
        return uvloop.run(run_router(config, on_ready=on_ready))
    check_config(config)
    check_exposure(config)

    def on_listening(url: str) -> None:
        _tell_ready(config, url, on_ready)

    return run_fleet(config, serve_in_slot, on_ready=on_listening)


def serve_in_slot(slot: ProcessSlot, config: RouterConfig) -> None:
    """One process of several: it obeys its parent alone, and ends with it."""
    set_up_logging(level=config.log_level, format=config.log_format, process="router")
    uvloop.run(run_router(replace(config, ready_file=str(slot.ready_file)), slot=slot))


@asynccontextmanager
async def start_router(config: RouterConfig, *, slot: ProcessSlot | None = None) -> AsyncIterator[RunningRouter]:
    """A listening router; leaving the block stops it. `slot`: it is one process of several."""
    check_config(config)
    async with AsyncExitStack() as stack:
        base = build_base(config, slot, stack)
        serving = await build_serving(base, stack)
        handle = build_guard(base, build_routes(base, serving))
        runner = make_runner(handle, limits_of(config), shutdown_timeout_s=config.shutdown_timeout_s)
        stack.push_async_callback(runner.cleanup)  # first to end: no new connection; running requests are waited for
        await runner.setup()
        if slot is not None:  # before it asks for the workers: no change of the pool is missed
            await web.UnixSite(runner, str(slot.socket(slot.row))).start()
            await base.peers.catch_up(base.table, now_s=time.monotonic())
        port = stack.enter_context(open_port(config.host, config.port, shared=slot is not None))
        await port.serve(runner)
        await _meet_workers(base, serving)
        spare_what_lives()
        yield RunningRouter(port.url, base, serving)


async def _meet_workers(base: Base, serving: Serving) -> None:
    """Each known worker was looked at once; from now on all are watched, and moved where that is wanted."""
    for worker in base.table.workers():
        serving.monitor.watch(worker)
    await serving.monitor.first_round()
    if serving.discovery is not None:
        serving.discovery.start()
    serving.auto_roles.start()


def _tell_ready(config: RouterConfig, url: str, on_ready: Callable[[str], None] | None) -> None:
    """It listens, with one process or with all."""
    if config.ready_file is not None:
        _write_ready_file(Path(config.ready_file), url)
    if on_ready is not None:
        on_ready(url)


def _write_ready_file(path: Path, url: str) -> None:
    """Written whole or not at all: a reader may poll for it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps({"router": url}))
    partial.replace(path)
