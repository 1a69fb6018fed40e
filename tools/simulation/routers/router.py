"""One life of the router: the production dispatcher, race, legs, worker table, health monitor and guard over a session
and requests that are simulated. They are coroutines; the loop that runs them has virtual time (aio.py).
"""

import service.http.request as served
from router.body import Api
from router.compose.routes import need_of
from router.history.metrics import counted
from router.pool.breaker import Health
from router.pool.worker import Role
from service.http.guard import make_guard
from service.http.routes import REQUEST_ID_HEADER, Routes, post
from service.process.stop_signals import StopSignals
from service.security.browser import BrowserRule
from tools.simulation.aio import VirtualLoop
from tools.simulation.http import Reply, Request, serve
from tools.simulation.network import Network
from tools.simulation.options import Options
from tools.simulation.routers.incoming import incoming
from tools.simulation.routers.parts import RouterParts
from tools.simulation.world import Process, Violation

PORT = 80


class Router:
    def __init__(
        self, *, process: Process, network: Network, options: Options, workers: list[tuple[str, Role]]
    ) -> None:
        self.process = process
        self.aio = VirtualLoop(process)
        self.network = network
        self.signals = StopSignals()
        parts = RouterParts(network=network, process=process, aio=self.aio, options=options)
        self.table, self.rooms, self.live = parts.table, parts.rooms, parts.live
        self.moves, self.monitor, self.dispatcher = parts.moves, parts.monitor, parts.dispatcher
        self._upstream = parts.upstream
        browser = BrowserRule(host=parts.config.host, has_keys=False)
        generate = counted(self.dispatcher.handle, parts.metrics)
        routes = Routes(post(api.value, generate) for api in Api)
        self._guard = make_guard(routes, gate=parts.gate, need_of=need_of, browser=browser, new_id=lambda: process.name)
        self._num_requests = 0
        self._seen = (0, 0, 0)
        for node, role in workers:
            self.table.add(f"http://{node}:80", role=role)
        self.aio.run(self._watch_all)
        serve(network, process, f"{process.node}:{PORT}", self._handle)

    def _watch_all(self) -> None:
        for worker in self.table.workers():
            self.monitor.watch(worker)

    def _handle(self, request: Request, reply: Reply) -> None:
        if request.path not in tuple(Api):
            reply.whole(404, b"{}")  # what the web server does
            return
        self._num_requests += 1
        name = request.headers.get(REQUEST_ID_HEADER) or f"{self.process.name}-{self._num_requests}"
        self._upstream.note(name, request)
        http = incoming(request, reply, name)
        task = self.aio.run(lambda: self.aio.create_task(self._serve(http, reply)))
        reply.on_gone = lambda: self.aio.run(task.cancel)  # as our server does

    async def _serve(self, http: served.HttpRequest, reply: Reply) -> None:
        response = await self._guard(http)
        if not isinstance(response, served.StreamedResponse):
            retry_after = response.headers.get("Retry-After", "")
            reply.whole(response.status_code, bytes(response.body), retry_after=retry_after)

    def has_asked(self, node: str, since_s: float) -> bool:
        """Whether all this time, by the world's clock, it has taken the worker at `node` for one that may live."""
        worker = self.table.find(f"http://{node}:80")
        changed_s = worker.checks.changed_s - self.process.skew_s
        return worker.health is not Health.DOWN and changed_s < since_s and self.process.born_s < since_s

    def check_if_changed(self) -> None:
        seen = (self.table.loads.num_leases, self.rooms.num_live, len(self.aio.errors))
        if seen != self._seen:
            self._seen = seen
            self.check()

    def check(self) -> None:
        self.table.check()
        self.rooms.check()
        if self.aio.errors:
            raise Violation(f"{self.process.name}: an error was lost: {self.aio.errors[0]}")

    def leftovers(self) -> list[str]:
        open_things = {
            "leases": self.table.loads.num_leases,
            "rooms": self.rooms.num_live,
            "tails": len(self.dispatcher.launcher.tails),
        }
        return [f"{self.process.name}: {count} {what}" for what, count in open_things.items() if count]
