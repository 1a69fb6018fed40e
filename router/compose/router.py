"""Builds a router process in order; the exit stack closes its parts in reverse."""

import time
from contextlib import AsyncExitStack

from router.attempts.pair_attempt import AttemptLauncher
from router.client.session import open_session
from router.client.upstream import HttpUpstream
from router.compose.core import RouterCore
from router.compose.dispatcher import Owners, make_dispatcher
from router.compose.events import make_events
from router.compose.exposure import ways_of
from router.history.recorder import RequestTraces
from router.http.worker_calls import WorkerCalls
from router.parts.failover import MoveOrders
from router.parts.prefix import Conversations
from router.pool.active_calls import LetGo, give_up_all
from router.pool.discovery import open_discovery
from router.pool.health import HealthMonitor
from router.requests.dispatch import Dispatcher
from router.requests.responses import SharedBook
from router.roles.auto import AutoRoles
from router.roles.switch import Switch
from service.responses.store import LocalBook

CONNECT_TIMEOUT_S = 5.0  # to a worker: a SYN is sent again after 1 and 3 s


class Router(RouterCore):
    """`url`: once it listens."""

    url = ""

    async def connect(self, stack: AsyncExitStack) -> None:
        """Requests start with `monitor.watch` or `discovery.start`."""
        config, table, credentials = self.config, self.table, self.credentials
        client = {
            "connect_timeout_s": CONNECT_TIMEOUT_S,
            "request_timeout_s": config.request_timeout_s,
            "dead_timeout_s": config.dead_worker_timeout_s,
        }
        self.session = await stack.enter_async_context(open_session(**client))
        self.upstream = HttpUpstream(**client)
        stack.push_async_callback(self.upstream.close)
        self.monitor = HealthMonitor(
            config=config,
            table=table,
            session=self.session,
            credentials=credentials,
            upstream=self.upstream,
            on_report=lambda worker, report: self.recorder.on_report(worker.role, worker.report, report),
            on_info=self.on_info,
            let_go=self._let_go(stack),
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

    def _let_go(self, stack: AsyncExitStack) -> LetGo:
        """Return what takes calls from workers: they move with their KV, or start anew."""
        if self.secret is None or self.config.disable_kv_moves:
            return give_up_all
        moves = MoveOrders(self.session, self.credentials, secret=self.secret)
        stack.push_async_callback(moves.close)
        return moves.let_go

    def _dispatcher(self) -> Dispatcher:
        index = self.chooser.index
        events = make_events(
            traces=RequestTraces(self.tracer, self.recorder, log_requests=self.config.log_requests),
            recorder=self.recorder,
            metrics=self.metrics,
            forecast=self.admission.forecast,
            monitor=self.monitor,
            conversations=[] if index is None else [Conversations(index, self.admission.forecast)],
        )
        launcher = AttemptLauncher(
            table=self.table,
            rooms=self.rooms,
            upstream=self.upstream,
            events=events,
            secret=self.secret,
            clock=time.monotonic,
            parts=() if self.prefixes is None else (self.prefixes.prepare,),
        )
        owners = Owners(
            admission=self.admission,
            encoders=self.encoders,
            book=self.book,
            live=self.live,
            credentials=self.credentials,
            session=self.session,
        )
        return make_dispatcher(self.config, owners, launcher, self.chooser)
