"""Builds the parts of a router process in order; the exit stack closes them in reverse."""

import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from aiohttp import web

from router.admission.admission import Admission
from router.admission.queue import make_limiter
from router.attempts.encoder_headers import EncoderHeaders
from router.attempts.pair_attempt import AttemptLauncher, RoomMinter
from router.body import PUTS, Api
from router.choice.chooser import Chooser, make_chooser
from router.choice.encoders import Encoders
from router.choice.kv_feed import KVEventFeed
from router.choice.prefix_sources import PrefixHeaders, PrefixSources, Replication
from router.client.credentials import Credentials
from router.client.session import open_session
from router.client.upstream import HttpUpstream
from router.config import RouterConfig
from router.fleet import PeerProcesses, ProcessSlot
from router.history.recorder import Recorder
from router.history.trace import RequestTraces
from router.http.access import FILES, limit_rate, need_of
from router.http.dashboard import Dashboard
from router.http.fan_out import AnyWorkerApi, FanOutApi, LoadsApi
from router.http.health_api import HealthApi
from router.http.traces_api import TracesApi
from router.http.worker_calls import WorkerCalls
from router.http.workers_api import WorkersApi
from router.metrics import RouterMetrics, counted
from router.pool.active_calls import ActiveCall, give_up_all
from router.pool.discovery import open_discovery
from router.pool.health import HealthMonitor
from router.pool.moves import MoveOrders
from router.pool.shared_load import SharedLoad
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable, WorkerTableError
from router.requests.build import make_dispatcher, make_events, ways_of
from router.requests.copies import PrefixCopies
from router.requests.dispatch import Dispatcher
from router.requests.live import LiveRequests
from router.requests.responses import Responses, ResponsesApi, SharedBook
from router.roles.auto import AutoRoles
from router.roles.switch import Switch
from service.flags import ConfigError
from service.http.guard import make_guard
from service.http.home import Home, Pages
from service.http.routes import INVOCATIONS, Handler, Routes, unserved_routes
from service.http.server import RequestLimits
from service.responses.store import MAX_BYTES, LocalBook, ResponseStore
from service.security.browser import BrowserRule, require_secret
from service.security.keys import KeyGate, KeyRing, open_gate
from service.security.secret import read_secret_file, router_secret
from service.telemetry.exporters import open_exporter
from service.telemetry.records import Tracer

CONNECT_TIMEOUT_S = 5.0  # to a worker: a SYN is sent again after 1 and 3 s
HEADER_TIMEOUT_S = 10.0  # for a client to send the head of a request: anyone may connect
BODY_TIMEOUT_S = 60.0  # for the body: 64 MiB at 9 Mbit/s

log = logging.getLogger(__name__)


class Router:
    """A router process. `slot`: among several. `url`: once it listens."""

    url = ""

    def __init__(self, config: RouterConfig, slot: ProcessSlot | None, stack: AsyncExitStack) -> None:
        """Build the parts that need no worker. Raises ConfigError."""
        self._stack = stack
        self.config, self.slot = config, slot
        cluster_secret, self.gate = check_exposure(config)
        self.secret = router_secret(cluster_secret)
        _check_secret(config, self.secret)
        self.credentials = Credentials(
            api=self.gate.api,
            worker=KeyRing(key=config.worker_api_key, file=config.worker_api_key_file, flag="--worker-api-key"),
            admin=KeyRing(
                key=config.worker_admin_api_key, file=config.worker_admin_api_key_file, flag="--worker-admin-api-key"
            ),
        )
        self.rooms = RoomMinter()
        self.live = LiveRequests()
        peer_load = None if slot is None else SharedLoad(slot.load_file, row=slot.row, num_rows=slot.num_rows)
        self.peers = PeerProcesses(slot)
        stack.push_async_callback(self.peers.close)
        exporter = open_exporter(enable=config.enable_trace, endpoint=config.otlp_traces_endpoint, process="router")
        self.tracer = Tracer(exporter=exporter)
        stack.callback(self.tracer.close)
        self.recorder = Recorder(time.monotonic, place=0 if slot is None else slot.row)
        self.chooser = make_chooser(config, draw=random.Random(secrets.randbits(64)).randrange)
        self.prefixes = _prefixes(config, self.chooser, self.secret)
        self.feed = KVEventFeed(chooser=self.chooser, secret=cluster_secret, enabled=not config.disable_kv_events)
        stack.push_async_callback(self.feed.close)
        self.admission = Admission(config, peers=peer_load)
        self.table = _table(config, peer_load)
        self.table.on_gone = self._on_gone
        self.encoders = EncoderHeaders(encoders=Encoders(), table=self.table, secret=self.secret)
        self.responses = _responses(config)
        self.metrics = RouterMetrics(
            self.table,
            feed=self.feed,
            admission=self.admission,
            responses=self.responses,
            prefixes=self.prefixes,
            encoders=self.encoders,
            ways=ways_of(config),
        )

    async def connect(self, stack: AsyncExitStack) -> None:
        """Build workers' clients; requests start with `monitor.watch` or `discovery.start`."""
        config, table, credentials = self.config, self.table, self.credentials
        client = {
            "connect_timeout_s": CONNECT_TIMEOUT_S,
            "request_timeout_s": config.request_timeout_s,
            "dead_timeout_s": config.dead_worker_timeout_s,
        }
        self.session = await stack.enter_async_context(open_session(**client))
        self.upstream = HttpUpstream(**client)
        stack.push_async_callback(self.upstream.close)
        let_go: Callable[[Worker, Sequence[ActiveCall], str], None] = give_up_all
        if self.secret is not None and not config.disable_kv_moves:
            moves = MoveOrders(self.session, credentials, secret=self.secret)
            stack.push_async_callback(moves.close)
            let_go = moves.let_go
        self.monitor = HealthMonitor(
            config=config,
            table=table,
            session=self.session,
            credentials=credentials,
            upstream=self.upstream,
            on_report=lambda worker, report: self.recorder.on_report(worker.role, worker.report, report),
            on_info=self._on_info,
            let_go=let_go,
        )
        stack.push_async_callback(self.monitor.close)
        self.discovery = await open_discovery(config, table=table, monitor=self.monitor)
        if self.discovery is not None:
            stack.push_async_callback(self.discovery.close)
        self.switch = Switch(
            table=table, monitor=self.monitor, session=self.session, credentials=credentials, peers=self.peers
        )
        stack.push_async_callback(self.switch.close)
        self.auto_roles = AutoRoles(
            config=config,
            table=table,
            mover=self.switch,
            metrics=self.metrics,
            peers=self.peers,
            leads=self.slot is None or self.slot.row == 0,
        )
        stack.push_async_callback(self.auto_roles.close)
        self.calls = WorkerCalls(self.session, table=table, credentials=credentials, ways=ways_of(config))
        self.book = None
        if self.responses is not None:
            self.book = SharedBook(LocalBook(self.responses), self.peers, self.calls.abort)
        self.dispatcher = self._dispatcher()
        stack.callback(self.dispatcher.launcher.close)

    def handler(self) -> Handler:
        """Return the request handler; rate limits are divided among processes."""
        config, share = self.config, 1 if self.slot is None else self.config.workers
        limiter = make_limiter(config.rate_limit_requests_per_second / share, -(-config.rate_limit_burst // share))
        return make_guard(
            self.routes(),
            gate=self.gate,
            need_of=need_of,
            browser=_browser_rule(config, self.gate),
            admit=None if limiter is None else limit_rate(limiter, self.metrics),
            is_trusted=None if self.slot is None else self.peers.is_peer,
            on_refused=self.metrics.on_refused,
            new_id=partial(secrets.token_hex, 16),
        )

    def _dispatcher(self) -> Dispatcher:
        events = make_events(
            traces=RequestTraces(self.tracer, self.recorder, log_requests=self.config.log_requests),
            recorder=self.recorder,
            metrics=self.metrics,
            forecast=self.admission.forecast,
            monitor=self.monitor,
        )
        launcher = AttemptLauncher(
            table=self.table,
            rooms=self.rooms,
            upstream=self.upstream,
            events=events,
            secret=self.secret,
            clock=time.monotonic,
            prefixes=self.prefixes,
            encoders=self.encoders,
        )
        if self.prefixes is not None and self.prefixes.replication is not None:
            self._copy_hot_prefixes(launcher, self.prefixes, self.prefixes.replication)
        return make_dispatcher(
            self.config,
            launcher=launcher,
            chooser=self.chooser,
            admission=self.admission,
            metrics=self.metrics,
            credentials=self.credentials,
            live=self.live,
            responses=Responses(book=self.book),
            session=self.session,
        )

    def _copy_hot_prefixes(self, launcher: AttemptLauncher, prefixes: PrefixHeaders, replication: Replication) -> None:
        copies = PrefixCopies(launcher=launcher, prefixes=prefixes, replication=replication)
        launcher.events = replace(launcher.events, on_sent=(*launcher.events.on_sent, copies.on_sent))
        self._stack.callback(copies.close)

    def routes(self) -> Routes:
        config, peers, calls = self.config, self.peers, self.calls
        health = HealthApi(calls, live=self.live, metrics=self.metrics, peers=peers)
        workers = WorkersApi(
            calls, config=config, monitor=self.monitor, switch=self.switch, peers=peers, discovery=self.discovery
        )
        any_worker = AnyWorkerApi(calls)
        fan_out = FanOutApi(calls, monitor=self.monitor, gate=self.gate, live=self.live, peers=peers)
        dashboard = Dashboard(
            config=config,
            table=self.table,
            recorder=self.recorder,
            live=self.live,
            num_running=lambda: self.admission.queue.num_everywhere,
            peers=peers,
            auto_roles=self.auto_roles.leading_status if config.auto_roles else None,
        )
        traces = TracesApi(calls=calls, tracer=self.tracer, peers=peers, memory=dashboard.memory)
        generate = counted(self.dispatcher.handle, self.metrics)
        return Routes(
            [
                *(web.post(api.value, generate) for api in Api),
                *(web.put(api.value, generate) for api in PUTS),
                web.post(INVOCATIONS, counted(self.dispatcher.invoke, self.metrics)),
                *health.routes(),
                *workers.routes(),
                *fan_out.routes(),
                *any_worker.routes(),
                *LoadsApi(calls).routes(),
                *ResponsesApi(self.book, peers=peers).routes(),
                *Pages(FILES).routes(),
                *self._home().routes(),
                *unserved_routes(),
                *dashboard.routes(),
                *traces.routes(),
                *self.auto_roles.routes(),
            ]
        )

    def _home(self) -> Home:
        pages = {"/chat": "talk to the model", "/dashboard": "what router and workers do right now"}
        links = {path: what for path, what in pages.items() if path in FILES}
        return Home(server="router", models=lambda: self.table.models.names, links=links)

    def _on_info(self, worker: Worker, info: object) -> None:
        self.feed.on_info(worker, info)
        self.encoders.encoders.on_info(worker, info)
        if self.prefixes is not None:
            self.prefixes.sources.on_info(worker, info)

    def _on_gone(self, worker: Worker) -> None:
        self.feed.on_gone(worker)
        self.encoders.encoders.on_gone(worker)
        if self.prefixes is not None:
            self.prefixes.sources.on_gone(worker)
        self.admission.forecast.forget(worker)


def _prefixes(config: RouterConfig, chooser: Chooser, secret: bytes | None) -> PrefixHeaders | None:
    index = chooser.cache_of(Role.PREFILL) if config.prefix_fetch else None
    if index is None or secret is None:
        return None
    bytes_a_s = config.prefix_copy_bytes_per_second
    replication = Replication(bytes_a_s=bytes_a_s) if bytes_a_s else None
    return PrefixHeaders(sources=PrefixSources(index), secret=secret, replication=replication)


def limits_of(config: RouterConfig) -> RequestLimits:
    return RequestLimits(
        max_body_bytes=config.max_body_bytes,
        header_timeout_s=HEADER_TIMEOUT_S,
        body_timeout_s=BODY_TIMEOUT_S,
        size_flag="--max-body-bytes",
    )


def check_exposure(config: RouterConfig) -> tuple[bytes | None, KeyGate]:
    """Return the cluster secret and the key gate. ConfigError for a public router without keys."""
    gate = open_gate(
        api_key=config.api_key,
        api_key_file=config.api_key_file,
        admin_api_key=config.admin_api_key,
        admin_api_key_file=config.admin_api_key_file,
    )
    _browser_rule(config, gate)  # reports bad flags before any process starts
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


def _check_secret(config: RouterConfig, secret: bytes | None) -> None:
    """Raise ConfigError for flags that need a secret, by which workers know their router."""
    asked = {
        "--prefix-fetch": config.prefix_fetch,
        "--encode": config.encode,
        "--resume-window": config.resume_window_s,
    }
    for flag, is_given in asked.items():
        if is_given and secret is None:
            raise ConfigError(
                f"{flag}: needs --cluster-secret-file, by which workers know their router; give both the file"
            )


def _browser_rule(config: RouterConfig, gate: KeyGate) -> BrowserRule:
    return BrowserRule(
        host=config.host,
        has_keys=gate.is_set,
        allowed_hosts=config.allowed_hosts,
        allowed_origins=config.allowed_origins,
    )


def _responses(config: RouterConfig) -> ResponseStore | None:
    if config.max_stored_responses == 0:
        return None
    max_count = -(-config.max_stored_responses // config.workers)
    return ResponseStore(max_count=max_count, max_bytes=MAX_BYTES // config.workers)


def _table(config: RouterConfig, peers: SharedLoad | None) -> WorkerTable:
    table = WorkerTable(config, peers, breaker=config)
    named = [(url, Role.PREFILL, port) for url, port in config.prefill]
    named += [(url, Role.DECODE, None) for url in config.decode]
    named += [(url, Role.UNIFIED, None) for url in config.worker_urls]
    named += [(url, Role.ENCODE, None) for url in config.encode]
    try:
        for url, role, port in named:
            table.add(url, role=role, bootstrap_port=port, now_s=time.monotonic())
    except WorkerTableError as err:
        raise ConfigError(f"--prefill/--decode/--worker-urls/--encode: {err}; name each worker once") from None
    return table
