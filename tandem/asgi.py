"""`tandem.asgi.app`: the HTTP API of a worker, to mount in an application of one's own.

    service = FastAPI()
    service.mount("/llm", tandem.asgi.app("smollm2"))

The worker has an event loop of its own; ASGI messages cross between the loops.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope, Send

from engine.frontend.app import SPARE_REQUESTS, make_app, make_handle
from engine.frontend.client.scheduler_link import ENGINE_DEAD
from engine.frontend.services import Services
from service.flags import ConfigError
from service.http.api import Application
from service.http.errors import ApiError
from service.http.routes import shape_of
from service.security.browser import BrowserRule
from tandem.async_llm import AsyncLLM
from tandem.errors import TandemError

T = TypeVar("T")


class WorkerApp(AsyncLLM):
    """A worker's HTTP API as an ASGI application, with an `LLM`'s arguments. `close` ends it.

    The model loads beside the caller; requests wait for it, and get 503 if it cannot.
    `allowed_hosts`, `allowed_origins`: as the flags of `tandem serve`; the application around it
    may be stricter.
    """

    def __init__(
        self,
        model: str = "",
        *,
        allowed_hosts: Sequence[str] = ("*",),
        allowed_origins: Sequence[str] = (),
        **flags: Any,
    ) -> None:
        super().__init__(model, **flags)
        self._allowed_hosts, self._allowed_origins = allowed_hosts, allowed_origins
        self._application: Application | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            services = await self._ready()
            if self._worker.over is not None:
                raise self._worker.over
        except (ConfigError, TandemError) as error:
            return await _refuse(scope, receive, send, str(error))
        if self._application is None:
            self._application = self._served(services)
        if scope["type"] != "http":
            return await self._application(scope, receive, send)
        here, client = asyncio.get_running_loop(), _Client(receive)
        answering = asyncio.ensure_future(
            self._run(self._application(scope, _crossing(here, client.receive), _crossing(here, send)))
        )
        leaving = asyncio.ensure_future(client.left())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            answering.cancel()
            await asyncio.gather(leaving, answering, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    def _served(self, services: Services) -> Application:
        browser = BrowserRule(
            host=services.spec.server.host,
            has_keys=False,
            allowed_hosts=self._allowed_hosts,
            allowed_origins=self._allowed_origins,
        )
        served = replace(services, browser=browser)
        return make_app(served, make_handle(served, max_open=services.client.max_live + SPARE_REQUESTS))


app = WorkerApp


async def _refuse(scope: Scope, receive: Receive, send: Send, why: str) -> None:
    if scope["type"] == "lifespan":
        await receive()
        return await send({"type": "lifespan.startup.failed", "message": why})
    if scope["type"] != "http":
        return await send({"type": "websocket.close", "code": 1011})
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    await shape_of(path).response(ApiError(503, why, code=ENGINE_DEAD))(scope, receive, send)


class _Client:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_sent_all = asyncio.Event()

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body"):
            self._has_sent_all.set()
        return message

    async def left(self) -> None:
        """Return when the client has left, behind its body, which the handler reads."""
        await self._has_sent_all.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _crossing(
    loop: asyncio.AbstractEventLoop, act: Callable[..., Awaitable[T]]
) -> Callable[..., Coroutine[Any, Any, T]]:

    async def there(*values: Any) -> T:
        return await act(*values)

    async def crossed(*values: Any) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(*values), loop))

    return crossed
