"""Builds the parts of a router and joins them; `server.py` listens with what is built here. Decides nothing, handles nothing.

    Base       what needs no socket: keys, the pool, choice, admission, rooms, what is remembered
    Serving    what asks workers: the clients, health checks, discovery, and the dispatcher that uses them all
    routes     which handler has which path, and the guard before them

A new part has its slot by what it needs. Each is closed by the exit stack, in the reverse order of its building.
"""

import logging
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from router.admission.admission import Admission
from router.admission.rate_limit import make_limiter
from router.attempts.events import Events, RequestObserver
from router.attempts.rooms import Entropy, RoomMinter
from router.attempts.upstream_call import CallFailed, CircuitReporter
from router.body import Api
from router.choice.chooser import Chooser, make_chooser
from router.choice.kv_feed import KVEventFeed
from router.client.credentials import Credentials
from router.client.session import open_session
from router.client.upstream import HttpUpstream
from router.config import RouterConfig
from router.dashboard.page import Dashboard
from router.fleet.peer_processes import PeerProcesses
from router.fleet.processes import ProcessSlot
from router.fleet.shared_load import SharedLoad
from router.history.recorder import Recorder
from router.history.trace import RequestTraces
from router.http.access import limit_rate, need_of
from router.http.fan_out import FanOutApi
from router.http.health_api import HealthApi
from router.http.worker_calls import WorkerCalls
from router.http.workers_api import WorkersApi
from router.metrics import RouterMetrics, counted
from router.pool.breaker import BreakerSettings
from router.pool.discovery import Discovery, open_discovery
from router.pool.health import HealthMonitor
from router.pool.peer_load import PeerLoad
from router.pool.states import Thresholds
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from router.requests.build import make_dispatcher, roles_of
from router.requests.dispatch import Dispatcher
from router.requests.live import LiveRequests
from router.roles.auto import AutoRoles
from router.roles.switch import Switch
from service.flags import ConfigError
from service.http.guard import make_guard
from service.http.routes import Handler, Routes
from service.security.addresses import require_secret
from service.security.browser import BrowserRule
from service.security.keys import KeyGate, open_gate
from service.security.secret import read_secret_file
from service.telemetry.otlp import open_exporter
from service.telemetry.tracer import Tracer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What needs no socket. `slot`: it is one process of several; `secret`: the cluster's, None without."""

    config: RouterConfig
    slot: ProcessSlot | None
    secret: bytes | None
    gate: KeyGate
    credentials: Credentials
    entropy: Entropy
    table: WorkerTable
    chooser: Chooser
    admission: Admission
    rooms: RoomMinter
    live: LiveRequests
    feed: KVEventFeed
    peers: PeerProcesses
    metrics: RouterMetrics
    recorder: Recorder
    tracer: Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What asks workers."""

    session: aiohttp.ClientSession
    upstream: HttpUpstream
    monitor: HealthMonitor
    discovery: Discovery | None
    switch: Switch
    auto_roles: AutoRoles
    dispatcher: Dispatcher


def build_base(config: RouterConfig, slot: ProcessSlot | None, stack: AsyncExitStack) -> Base:
    """Raises `ConfigError`."""
    secret, gate = check_exposure(config)
    peer_load = None if slot is None else SharedLoad(slot.load_file, row=slot.row, num_rows=slot.num_rows)
    exporter = open_exporter(enable=config.enable_trace, endpoint=config.otlp_traces_endpoint, process="router")
    tracer = Tracer(ring_size=config.trace_ring, exporter=exporter)
    stack.callback(tracer.close)
    peers = PeerProcesses(slot)
    stack.push_async_callback(peers.close)
    chooser = make_chooser(config, draw=secrets.randbelow)
    feed = KVEventFeed(chooser, secret=secret, enabled=not config.disable_kv_events)
    stack.push_async_callback(feed.close)
    table, admission, entropy = (
        _table(config, peer_load),
        Admission(config, peers=peer_load, chooser=chooser),
        Entropy(),
    )

    def on_gone(worker: Worker) -> None:
        feed.on_gone(worker)
        admission.forecast.forget(worker)

    table.on_gone = on_gone
    metrics = RouterMetrics(table, feed)
    metrics.show_admission(admission)
    return Base(
        config=config,
        slot=slot,
        secret=secret,
        gate=gate,
        credentials=Credentials(config, api=gate.api),
        entropy=entropy,
        table=table,
        chooser=chooser,
        admission=admission,
        rooms=RoomMinter(entropy.bits),
        live=LiveRequests(),
        feed=feed,
        peers=peers,
        metrics=metrics,
        recorder=Recorder(time.monotonic, place=0 if slot is None else slot.row),
        tracer=tracer,
    )


async def build_serving(base: Base, stack: AsyncExitStack) -> Serving:
    """Nothing is asked of workers yet: that begins with `monitor.watch` and `discovery.start`."""
    config = base.config
    client = {
        "connect_timeout_s": config.connect_timeout_s,
        "request_timeout_s": config.request_timeout_s,
        "dead_timeout_s": config.dead_worker_timeout_s,
    }
    session = await stack.enter_async_context(open_session(**client))
    upstream = HttpUpstream(**client)
    stack.push_async_callback(upstream.close)
    monitor = HealthMonitor(
        config=config,
        table=base.table,
        session=session,
        credentials=base.credentials,
        on_report=lambda worker, report: base.recorder.on_report(worker.role, worker.report, report),
        on_info=base.feed.on_info,
    )
    stack.push_async_callback(monitor.close)
    discovery = await open_discovery(config, table=base.table, monitor=monitor)
    if discovery is not None:
        stack.push_async_callback(discovery.close)
    switch = Switch(table=base.table, monitor=monitor, session=session, credentials=base.credentials, peers=base.peers)
    stack.push_async_callback(switch.close)
    auto_roles = AutoRoles(
        config,
        table=base.table,
        mover=switch,
        metrics=base.metrics,
        peers=base.peers,
        leads=base.slot is None or base.slot.row == 0,
    )
    stack.push_async_callback(auto_roles.close)
    dispatcher = _dispatcher(base, upstream, monitor)
    stack.callback(dispatcher.close)
    return Serving(
        session=session,
        upstream=upstream,
        monitor=monitor,
        discovery=discovery,
        switch=switch,
        auto_roles=auto_roles,
        dispatcher=dispatcher,
    )


class UnreachableWorkers(RequestObserver):
    """Has the health monitor look at a worker that a call could not reach."""

    def __init__(self, monitor: HealthMonitor) -> None:
        self._monitor = monitor

    def on_call_failed(self, failure: CallFailed, now_s: float) -> None:
        if failure.reason in ("refused", "lost") or failure.draining:
            log.warning("%s", failure)
            self._monitor.on_unreachable(failure)


def _dispatcher(base: Base, upstream: HttpUpstream, monitor: HealthMonitor) -> Dispatcher:
    """The dispatcher, its observers, and the parts that some flag asks for."""
    events = Events.of(
        (
            RequestTraces(base.tracer, base.recorder, log_requests=base.config.log_requests),
            base.recorder,
            base.metrics,
            base.admission.forecast,
            CircuitReporter(),
            UnreachableWorkers(monitor),
        )
    )
    return make_dispatcher(
        base.config,
        table=base.table,
        rooms=base.rooms,
        chooser=base.chooser,
        admission=base.admission,
        upstream=upstream,
        events=events,
        metrics=base.metrics,
        credentials=base.credentials,
        secret=base.secret,
        live=base.live,
        clock=time.monotonic,
    )


def build_routes(base: Base, serving: Serving) -> Routes:
    """Every path that is served."""
    calls = WorkerCalls(serving.session, table=base.table, credentials=base.credentials, roles=roles_of(base.config))
    health = HealthApi(calls, live=base.live, metrics=base.metrics, tracer=base.tracer, peers=base.peers)
    workers = WorkersApi(
        calls,
        config=base.config,
        monitor=serving.monitor,
        switch=serving.switch,
        peers=base.peers,
        discovery=serving.discovery,
    )
    fan_out = FanOutApi(calls, monitor=serving.monitor, gate=base.gate)
    dashboard = Dashboard(
        config=base.config,
        table=base.table,
        recorder=base.recorder,
        live=base.live,
        num_running=lambda: base.admission.num_running,
        peers=base.peers,
        auto_roles=serving.auto_roles.told if base.config.auto_roles else None,
    )
    generate = counted(serving.dispatcher.handle, base.metrics)
    return Routes(
        [
            *(web.post(api.value, generate) for api in Api),
            web.put(Api.GENERATE.value, generate),
            *health.routes(),
            *workers.routes(),
            *fan_out.routes(),
            *dashboard.routes(),
            *serving.auto_roles.routes(),
        ]
    )


def build_guard(base: Base, routes: Routes) -> Handler:
    """The function that answers every request. Each of several processes sees its share of a client's requests."""
    config, share = base.config, base.config.workers if base.slot is not None else 1
    limiter = make_limiter(config.rate_limit_requests_per_second / share, -(-config.rate_limit_burst // share))
    return make_guard(
        routes,
        gate=base.gate,
        need_of=need_of,
        browser=_browser_rule(config, base.gate),
        admit=None if limiter is None else limit_rate(limiter, base.metrics),
        is_trusted=None if base.slot is None else base.peers.is_peer,
        on_refused=base.metrics.on_refused,
        new_id=base.entropy.name,
    )


def check_exposure(config: RouterConfig) -> tuple[bytes | None, KeyGate]:
    """Return the cluster's secret and the key gate. Raises `ConfigError` for a router that is open to every address without keys."""
    gate = open_gate(
        api_key=config.api_key,
        api_key_file=config.api_key_file,
        admin_api_key=config.admin_api_key,
        admin_api_key_file=config.admin_api_key_file,
    )
    _browser_rule(config, gate)  # refuses a flag before any process starts
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


def _browser_rule(config: RouterConfig, gate: KeyGate) -> BrowserRule:
    return BrowserRule(
        host=config.host,
        has_keys=gate.is_set,
        allowed_hosts=config.allowed_hosts,
        allowed_origins=config.allowed_origins,
    )


def _table(config: RouterConfig, peers: PeerLoad | None) -> WorkerTable:
    thresholds = Thresholds(failure=config.health_failure_threshold, success=config.health_success_threshold)
    breaker = BreakerSettings(
        failure=config.cb_failure_threshold,
        success=config.cb_success_threshold,
        timeout_s=config.cb_timeout_duration_s,
        window_s=config.cb_window_duration_s,
        enabled=not config.disable_circuit_breaker,
    )
    table = WorkerTable(thresholds, peers, breaker=breaker)
    now_s = time.monotonic()
    try:
        for url, port in config.prefill:
            table.add(url, role=Role.PREFILL, bootstrap_port=port, now_s=now_s)
        for url in config.decode:
            table.add(url, role=Role.DECODE, now_s=now_s)
        for url in config.worker_urls:
            table.add(url, role=Role.UNIFIED, now_s=now_s)
    except ValueError as err:
        raise ConfigError(f"--prefill/--decode/--worker-urls: {err}; name each worker once") from None
    return table
