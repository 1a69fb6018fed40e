"""Runs an additional frontend on the same port, until the main one ends it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Response

from engine.frontend.app import HTTP_CLOSE_S, SPARE_REQUESTS, make_app, make_handle
from engine.frontend.assembly import connected
from engine.frontend.client.scheduler_link import SharedRequests
from engine.frontend.internal import forwarding_to, make_internal_handle
from engine.frontend.routes import ROUTES
from engine.frontend.services import Services
from engine.frontend.spec import FrontendSlot, FrontendSpec, limits_of
from engine.ipc import MAIN_FRONTEND, IpcPaths
from engine.stamps import Stamp, Stamps
from service.http.heartbeats import EVERY_S, STAMPS, wait_s
from service.http.listening import ListeningPort
from service.http.request import Handler, HttpRequest, asgi_app
from service.http.routes import Routes
from service.http.server import serving
from service.process.start import spare_what_lives
from service.security.keys import KeyGate
from service.waiter import end_tasks


async def run_other_frontend(
    spec: FrontendSpec, *, row: int, ipc: IpcPaths, gate: KeyGate, port: ListeningPort, ended: asyncio.Event
) -> None:
    """Serve until `ended`. Raises ConfigError for an unusable checkpoint."""
    limits, num_rows = limits_of(spec.server), spec.server.num_frontends
    shared = SharedRequests(ipc.dir, row=row, num_rows=num_rows, num_ranks=spec.engine.dp_size)
    slot = FrontendSlot(stamps=Stamps(ipc.dir), row=row, shared=shared)
    with connected(spec, ipc=ipc, dead=lambda: None, gate=gate, slot=slot) as s:
        async with _handling(s, ipc) as handle:
            internal = asgi_app(make_internal_handle(s), limits)
            async with (
                serving(ipc.http_socket(row), internal, limits, shutdown_timeout_s=HTTP_CLOSE_S),
                serving(port, make_app(s, handle), limits, shutdown_timeout_s=HTTP_CLOSE_S),
            ):
                tasks = [asyncio.create_task(one) for one in (_settle(s), _stamp(Stamp(ipc.dir, f"frontend {row}")))]
                await ended.wait()
                await end_tasks(tasks)
        s.close()
        shared.close()


@asynccontextmanager
async def _handling(s: Services, ipc: IpcPaths) -> AsyncIterator[Handler]:
    own = make_handle(s, max_open=s.client.max_live + SPARE_REQUESTS)
    of_main = Routes(route for route in ROUTES if not route.anywhere)
    async with forwarding_to(ipc.http_socket(MAIN_FRONTEND)) as forward:

        async def handle(request: HttpRequest) -> Response:
            is_of_main = of_main.find(request.method, request.path).path != ""
            return await (forward if is_of_main else own)(request)

        yield handle


async def _settle(s: Services) -> None:
    await s.leaders.ready.wait()
    spare_what_lives()


async def _stamp(stamp: Stamp) -> None:
    while True:
        stamp.write(time.monotonic())
        await asyncio.sleep(wait_s(time.monotonic(), EVERY_S, phase=STAMPS))
