"""Hosts that images are fetched from, on addresses of this machine: the tests' outside, and an inside that nothing may reach."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from service.images.fetch import FETCH_TIMEOUT_S, MAX_IMAGE_BYTES, ImageFetcher
from service.images.hosts import ImageFlags

OUTSIDE, INSIDE = "127.0.0.2", "127.0.0.1"
PNG = b"\x89PNG what a host sends"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Host:
    """`seen`: path and headers of its requests."""

    address: str
    port: int = 0
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"


class Names(AbstractResolver):
    """A name server whose answers a test writes: for each name a list of answers, the last of which stays."""

    def __init__(self, answers: dict[str, list[list[str]]]) -> None:
        self.answers = answers
        self.num_asked = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        self.num_asked += 1
        answers = self.answers[host]
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None: ...


@asynccontextmanager
async def host(answer: Handler, address: str = OUTSIDE, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Host]:
    """`tls`: it speaks https."""
    found = Host(address)

    async def handle(request: web.Request) -> web.StreamResponse:
        found.seen.append((request.path_qs, {name.lower(): value for name, value in request.headers.items()}))
        return await answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address, 0, ssl_context=tls)
        await site.start()
        found.port = runner.addresses[0][1]
        yield found
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_host(answer: bytes, *, then_waits: bool = False) -> AsyncIterator[Host]:
    """Answers each connection with these bytes, and closes it, or never does."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        if then_waits:
            await over.wait()
        writer.close()

    server = await asyncio.start_server(serve, OUTSIDE, 0)
    async with server:
        yield Host(OUTSIDE, server.sockets[0].getsockname()[1])
        over.set()


async def answer_png(request: web.Request) -> web.StreamResponse:
    return web.Response(body=PNG, content_type="image/png")


def redirect_to(*targets: str) -> Handler:
    """To each in turn, then to the last one."""
    left = list(targets)

    async def answer(request: web.Request) -> web.StreamResponse:
        target = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=302, headers={"Location": target})

    return answer


def fetcher(
    names: Names | None = None,
    *,
    networks: Sequence[str] = (f"{OUTSIDE}/32",),
    timeout_s: float = FETCH_TIMEOUT_S,
    max_image_bytes: int = MAX_IMAGE_BYTES,
    **flags: object,
) -> ImageFetcher:
    given = ImageFlags(allowed_media_networks=tuple(networks), **flags)  # type: ignore[arg-type]
    return ImageFetcher(given, resolver=names, timeout_s=timeout_s, max_image_bytes=max_image_bytes)
