"""The router's HTTP server and the port it listens at. Knows no routes, and nothing of workers."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from router.config import RouterConfig, RouterConfigError
from router.http.reading import TimedRequest, TimedServer
from router.http.routes import Handler, Routes


def http_server(
    config: RouterConfig,
    routes: Routes,
    guard: Callable[[web.BaseRequest, Handler], Awaitable[web.StreamResponse]],
) -> web.ServerRunner:
    """aiohttp's server without its application layer, which costs as much as the server itself."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return await guard(request, routes.handler(request.method, request.path))

    def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        request = TimedRequest(message, payload, protocol, writer, task, loop, client_max_size=config.max_body_bytes)
        request.body_timeout_s = config.body_timeout_s
        return request

    server = TimedServer(handle, request_factory=make_request, header_timeout_s=config.header_timeout_s)
    return web.ServerRunner(server, shutdown_timeout=config.shutdown_timeout_s)


async def listen(runner: web.ServerRunner, config: RouterConfig, *, shared: bool) -> int:
    """Bind; the port that was taken (config.port may be 0)."""
    site = web.TCPSite(runner, config.host, config.port, reuse_port=shared or None)
    try:
        await site.start()
    except OSError as err:
        raise RouterConfigError(_listen_message(config, err)) from None
    return next(int(address[1]) for address in runner.addresses if isinstance(address, tuple))


def _listen_message(config: RouterConfig, err: OSError) -> str:
    if err.errno == errno.EADDRINUSE:
        return f"--port: {config.host}:{config.port} is taken; choose another --port (0: a free one)"
    return f"--host/--port: cannot listen on {config.host}:{config.port}: {err.strerror or err}"


def url_host(host: str) -> str:
    """How a client on this machine reaches us."""
    if host in ("", "0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
