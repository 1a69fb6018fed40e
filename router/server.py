"""Puts the router together and runs it. The only place that builds its parts, listens, and handles signals."""

import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import uvloop
from aiohttp import web

from lifecycle.stop_signals import StopSignals
from router.admission.admission import Admission
from router.admission.rate_limit import make_limiter
from router.choice.chooser import make_chooser
from router.choice.kv_feed import KVEventFeed
from router.config import RouterConfig, RouterConfigError, check_config
from router.dashboard.page import Dashboard
from router.dashboard.recorder import Recorder
from router.fleet.processes import Place, obey_parent, run_fleet
from router.fleet.shared_load import SharedLoad
from router.fleet.siblings import Siblings
from router.http.control import Control
from router.http.credentials import Credentials
from router.http.guard import make_guard
from router.http.listening import http_server, listen, url_host
from router.http.routes import Routes
from router.http.session import open_session
from router.http.upstream import HttpUpstream
from router.metrics import RouterMetrics
from router.pool.breaker import BreakerSettings
from router.pool.discovery import open_discovery
from router.pool.health import HealthMonitor
from router.pool.lifelines import Lifelines
from router.pool.load_view import ALONE, LoadView
from router.pool.workers import Role, Thresholds, Worker, WorkerTable
from router.requests.dispatch import Dispatcher, Parts
from router.requests.draining import LiveRequests
from router.requests.entropy import Entropy
from router.requests.journey import Journeys
from router.requests.legs import Legs
from router.requests.rewrite import Api
from router.requests.rooms import RoomMinter
from router.roles.auto import AutoRoles
from router.roles.switch import Switch
from security.addresses import require_secret
from security.keys import Gate, open_gate
from security.secret import read_secret_file
from telemetry.logs import set_up_logging
from telemetry.otlp import open_exporter
from telemetry.tracer import Tracer

log = logging.getLogger(__name__)


class RunningRouter:
    """A router that listens at `url`; its state, for tests and for the launcher."""

    def __init__(
        self,
        *,
        url: str,
        table: WorkerTable,
        rooms: RoomMinter,
        gate: Gate,
        live: LiveRequests,
        lifelines: Lifelines,
        monitor: HealthMonitor,
        recorder: Recorder,
        admission: Admission,
    ) -> None:
        self.recorder = recorder
        self.url = url
        self.admission = admission
        self.lifelines = lifelines
        self.monitor = monitor
        self.gate = gate
        self.table = table
        self.rooms = rooms
        self.live = live


async def run_router(
    config: RouterConfig, *, on_ready: Callable[[str], None] | None = None, place: Place | None = None
) -> None:
    """Run until SIGTERM (drain), SIGINT or a second signal (end at once), or until cancelled. `on_ready(url)` is called once the router listens.

    `RouterConfigError` for a flag that cannot be honoured, a taken port included. It listens even when no worker is
    alive yet: requests are then answered 503, and /readiness says what is missing.
    """
    signals = StopSignals()
    if place is not None:
        obey_parent(on_drain=signals.on_sigterm, on_end=signals.on_sigint)
    async with start_router(config, place=place) as router:
        with signals.caught(on_hangup=lambda: router.gate.reload(time.monotonic()), only_hangup=place is not None):
            _tell_ready(config, router.url, on_ready)
            await signals.asked.wait()
            await router.live.drain(timeout_s=config.drain_timeout, at_once=signals.at_once)


def serve(config: RouterConfig, *, on_ready: Callable[[str], None] | None = None) -> None:
    """`run_router` on an event loop of its own (uvloop), or on several, each in a process (`--workers`)."""
    set_up_logging(level=config.log_level, format=config.log_format, process="router")
    if config.workers == 1:
        return uvloop.run(run_router(config, on_ready=on_ready))
    check_config(config)
    _check_exposure(config)

    def on_port(port: int) -> None:
        _tell_ready(config, _url(config, port), on_ready)

    return run_fleet(config, serve_in_place, on_ready=on_port)


def serve_in_place(place: Place, config: RouterConfig) -> None:
    """One process of several: told what to do by its parent alone, and ended with it."""
    set_up_logging(level=config.log_level, format=config.log_format, process="router")
    uvloop.run(run_router(replace(config, ready_file=str(place.ready_file)), place=place))


@asynccontextmanager
async def start_router(config: RouterConfig, *, place: Place | None = None) -> AsyncIterator[RunningRouter]:
    """A listening router; leaving the block stops it. `place`: it is one process of several."""
    check_config(config)
    secret, gate = _check_exposure(config)
    credentials = Credentials(config, api=gate.api)
    view: LoadView = ALONE
    if place is not None:
        view = SharedLoad(place.load_file, row=place.row, num_rows=place.num_rows)
    siblings = Siblings(place)
    exporter = open_exporter(enable=config.enable_trace, endpoint=config.otlp_traces_endpoint, process="router")
    tracer = Tracer(ring_size=config.trace_ring, exporter=exporter)
    entropy = Entropy()
    chooser = make_chooser(config, draw=secrets.randbelow)
    table = _table(config, view)
    feed = KVEventFeed(chooser, secret=secret, enabled=not config.disable_kv_events)

    def on_gone(worker: Worker) -> None:
        feed.on_gone(worker)
        admission.forecast.forget(worker)

    table.on_gone = on_gone
    rooms = RoomMinter(entropy.bits)
    metrics = RouterMetrics(table, feed)
    recorder = Recorder(time.monotonic, place=0 if place is None else place.row)
    live = LiveRequests()
    admission = Admission(config, view=view, chooser=chooser)
    client = {
        "connect_timeout_s": config.connect_timeout_s,
        "request_timeout_s": config.request_timeout_s,
        "dead_timeout_s": config.dead_worker_timeout_s,
    }
    upstream = HttpUpstream(**client)
    async with open_session(**client) as session:
        legs = Legs(upstream, Lifelines(timeout_s=config.dead_worker_timeout_s))
        monitor = HealthMonitor(
            config=config,
            table=table,
            session=session,
            credentials=credentials,
            legs=legs,
            on_info=feed.on_info,
            recorder=recorder,
        )
        discovery = await open_discovery(config, table=table, monitor=monitor)
        dispatcher = Dispatcher(
            Parts(
                config=config,
                table=table,
                rooms=rooms,
                chooser=chooser,
                legs=legs,
                metrics=metrics,
                credentials=credentials,
                secret=secret,
                live=live,
                admission=admission,
                on_unreachable=monitor.on_unreachable,
                recorder=recorder,
                journeys=Journeys(tracer, log_requests=config.log_requests),
            )
        )
        control = Control(
            config=config,
            table=table,
            monitor=monitor,
            session=session,
            metrics=metrics,
            gate=gate,
            credentials=credentials,
            roles=dispatcher.roles,
            live=live,
            siblings=siblings,
            tracer=tracer,
            discovery=discovery,
        )
        dashboard = Dashboard(
            config=config,
            table=table,
            recorder=recorder,
            live=live,
            num_running=lambda: admission.door.line.num_everywhere,
            siblings=siblings,
        )
        auto_roles = AutoRoles(
            config,
            table=table,
            mover=Switch(),
            metrics=metrics,
            siblings=siblings,
            leads=place is None or place.row == 0,
        )
        routes = Routes(
            [
                *(web.post(api.value, dispatcher.handle) for api in Api),
                web.put(Api.GENERATE.value, dispatcher.handle),
                *control.routes(),
                *dashboard.routes(),
                *auto_roles.routes(),
            ]
        )
        share = config.workers if place is not None else 1
        limiter = make_limiter(config.rate_limit_requests_per_second / share, -(-config.rate_limit_burst // share))
        guard = make_guard(gate=gate, limiter=limiter, metrics=metrics, new_id=entropy.name, is_sibling=siblings.is_one)
        runner = http_server(config, routes, guard)
        await runner.setup()
        try:
            if place is not None:  # before it asks who the workers are: no change of the pool is missed
                await web.UnixSite(runner, str(place.socket(place.row))).start()
                await siblings.catch_up(table, now_s=time.monotonic())
            port = await listen(runner, config, shared=place is not None)
            for worker in table.workers():
                monitor.watch(worker)
            await monitor.first_round()
            if discovery is not None:
                discovery.start()
            auto_roles.start()
            yield RunningRouter(
                url=_url(config, port),
                table=table,
                rooms=rooms,
                gate=gate,
                live=live,
                lifelines=legs.lifelines,
                monitor=monitor,
                recorder=recorder,
                admission=admission,
            )
        finally:
            await auto_roles.close()
            await runner.cleanup()  # takes no new connection, and waits for running requests
            if discovery is not None:
                await discovery.close()
            dispatcher.close()
            await upstream.close()
            await monitor.close()
            await feed.close()
            await siblings.close()
            tracer.close()


def _check_exposure(config: RouterConfig) -> tuple[bytes | None, Gate]:
    """The cluster's secret, and who may call. Raises `SecurityConfigError` where anybody could, from anywhere."""
    gate = open_gate(
        api_key=config.api_key,
        api_key_file=config.api_key_file,
        admin_api_key=config.admin_api_key,
        admin_api_key_file=config.admin_api_key_file,
    )
    warning = require_secret(
        config.host,
        flag="--host",
        what="the router",
        remedy="--api-key-file (or --api-key)",
        has_secret=gate.is_set,
        allow_insecure=config.allow_insecure,
    )
    if warning is not None:
        log.warning(warning)
    return None if config.cluster_secret_file is None else read_secret_file(config.cluster_secret_file), gate


def _table(config: RouterConfig, view: LoadView) -> WorkerTable:
    thresholds = Thresholds(failure=config.health_failure_threshold, success=config.health_success_threshold)
    breaker = BreakerSettings(
        failure=config.cb_failure_threshold,
        success=config.cb_success_threshold,
        timeout_s=config.cb_timeout_duration_secs,
        window_s=config.cb_window_duration_secs,
        enabled=not config.disable_circuit_breaker,
    )
    table = WorkerTable(thresholds, view, breaker=breaker)
    now_s = time.monotonic()
    try:
        for url, port in config.prefill:
            table.add(url, role=Role.PREFILL, bootstrap_port=port, now_s=now_s)
        for url in config.decode:
            table.add(url, role=Role.DECODE, now_s=now_s)
        for url in config.worker_urls:
            table.add(url, role=Role.UNIFIED, now_s=now_s)
    except ValueError as err:
        raise RouterConfigError(f"--prefill/--decode/--worker-urls: {err}; name each worker once") from None
    return table


def _url(config: RouterConfig, port: int) -> str:
    return f"http://{url_host(config.host)}:{port}"


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
