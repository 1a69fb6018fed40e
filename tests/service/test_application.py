"""A server's application: its routes are described, middleware sees them, and other servers mount it."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Response
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.requests import Request as StarletteRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.frontend.routes import APIS
from service.flags import ConfigError
from service.http.api import ApiRouter, Application, add_middleware, document
from service.http.errors import ApiError, RequestLimits
from service.http.guard import answer_of
from service.http.listening import open_port
from service.http.request import DirectWrites, HttpRequest
from service.http.routes import EXTRA_HEADERS, SSE_HEADERS, Routes, Tag, get, json_response, open_stream, post
from service.http.server import serving

LIMITS = RequestLimits(max_body_bytes=1 << 10)


async def echo(request: HttpRequest) -> Response:
    """Return the body."""
    return json_response({"path": request.path, "body": (await request.read()).decode()})


async def count(request: HttpRequest) -> Response:
    """Count to three in a stream.

    A callback writes.
    """
    request[EXTRA_HEADERS] = {}
    out, waiting = open_stream(request, headers=SSE_HEADERS), [b"1", b"2", b"3"]
    await out.write(b"0")
    direct = DirectWrites(out, take=lambda: waiting.pop(0), is_over=lambda: not waiting)

    def change() -> None:
        was_over = not waiting
        direct.on_change()
        if not was_over:
            asyncio.get_running_loop().call_soon(change)

    change()
    while waiting:
        await direct.wait()
        if waiting:  # this server has no writes from callbacks
            await out.write(waiting.pop(0))
    await out.end()
    return out


API = ApiRouter(
    Tag("Numbers", "Counts."), (post("/echo", echo), get("/count", count), get("/other", count, is_alias=True))
)


def application() -> Application:
    routes = Routes(API.table)

    async def handle(request: HttpRequest) -> Response:
        return await answer_of(routes.of(request).handler, request)

    return Application("Test", (API,), handle=handle, limits=LIMITS)


class Marked:
    """Middleware that adds a header."""

    def __init__(self, app: ASGIApp, value: str) -> None:
        self._app, self._value = app, value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-mark", self._value.encode())]
            await send(message)

        await self._app(scope, receive, marked)


@asynccontextmanager
async def ours(app: ASGIApp) -> AsyncIterator[str]:
    with open_port("127.0.0.1", 0) as port:
        async with serving(port, app, LIMITS, shutdown_timeout_s=0.1):
            yield port.url


@asynccontextmanager
async def theirs(app: ASGIApp) -> AsyncIterator[str]:
    """A plain uvicorn, as a user starts it."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        serving = asyncio.create_task(server._serve([sock]))
        try:
            async with asyncio.timeout(20):
                while not server.started:
                    await asyncio.sleep(0.01)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


async def answers(url: str) -> tuple[httpx.Response, httpx.Response, httpx.Response]:
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        return await http.post("/echo", content=b"hello"), await http.get("/count"), await http.get("/nothing")


@pytest.mark.parametrize("serve", [ours, theirs])
async def test_any_asgi_server_serves_it_with_middleware(
    serve: Callable[[ASGIApp], AbstractAsyncContextManager[str]],
) -> None:
    app = application()
    app.add_middleware(Marked, value="1")
    app.add_middleware(Marked, value="2")
    async with serve(app) as url:
        echoed, counted, lost = await answers(url)
    assert echoed.json() == {"path": "/echo", "body": "hello"} and counted.text == "0123"
    assert lost.status_code == 404 and lost.json()["error"]["code"] == "not_found"
    assert echoed.headers.get_list("x-mark") == ["1", "2"]


async def test_it_is_mounted_under_a_path_of_another_application() -> None:
    parent = FastAPI()
    parent.mount("/llm", application())
    async with theirs(parent) as url:
        echoed, counted, lost = await answers(url + "/llm")
    assert echoed.json() == {"path": "/echo", "body": "hello"} and counted.text == "0123" and lost.status_code == 404


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def test_a_body_that_breaks_is_refused_though_its_start_is_whole() -> None:
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with ours(application()) as url, connected(url) as (reader, writer):
        writer.write(head + b"5\r\nhello\r\nno size\r\n")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ") and b"the body cannot be read: " in answer


async def test_a_client_that_still_sends_reads_the_whole_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.http.server.LINGER_S", 3600.0)
    async with ours(application()) as url, connected(url) as (reader, writer):
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 4096\r\n\r\n" + b"a" * 1000)
        answer = await reader.read()
        writer.write(b"a" * 1000)  # a reset could have overtaken the answer
        await writer.drain()
    assert answer.startswith(b"HTTP/1.1 413 ") and b"longer than 1024 bytes" in answer


async def test_a_websocket_is_refused() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    await application()({"type": "websocket"}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1003}]


async def test_an_answer_has_the_date_of_its_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, dates = [0.0], []
    monkeypatch.setattr("service.http.server.time", SimpleNamespace(time=lambda: now_s[0]))
    async with ours(application()) as url, httpx.AsyncClient(base_url=url, timeout=20) as http:
        for now_s[0] in (1e9, 1e9 + 0.9, 1e9 + 1):
            dates.append((await http.get("/nothing")).headers["date"])
    assert dates == [f"Sun, 09 Sep 2001 01:46:{second} GMT" for second in (40, 40, 41)]


async def test_pieces_of_a_body_count_together() -> None:
    scope = {"type": "http", "raw_path": b"/echo", "query_string": b"", "headers": [(b"transfer-encoding", b"chunked")]}
    pieces = [{"type": "http.request", "body": b"a" * 800, "more_body": more} for more in (False, True)]

    async def receive() -> Message:
        return pieces.pop()

    async def send(message: Message) -> None:
        raise AssertionError(message)

    with pytest.raises(ApiError, match="longer than 1024 bytes"):
        await HttpRequest(scope, receive, send, LIMITS).read()


async def test_the_first_of_equal_fields_of_a_query_counts() -> None:
    scope = {"type": "http", "raw_path": b"/echo", "query_string": b"a=1&a=2&b=", "headers": []}

    async def none(*values: object) -> Message:
        return {}

    assert HttpRequest(scope, none, none, LIMITS).query == {"a": "1", "b": ""}


async def test_a_request_makes_no_span_of_fastapi(monkeypatch: pytest.MonkeyPatch) -> None:
    """service/telemetry/ traces requests: a second span of each would count them twice, and cost 3 us."""
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    async with ours(application()) as url:
        await answers(url)
    assert not spans.get_finished_spans()


def test_what_the_document_says_of_a_route() -> None:
    described = application().openapi()
    assert described["tags"] == [{"name": "Numbers", "description": "Counts."}]
    assert list(described["paths"]) == ["/echo", "/count"]
    counting = described["paths"]["/count"]["get"]
    assert (counting["summary"], counting["description"]) == ("Count to three in a stream", "A callback writes.")
    assert counting["tags"] == ["Numbers"]


def test_each_route_of_a_worker_has_a_summary_and_a_tag() -> None:
    described = document(APIS, title="worker")
    tags = {tag["name"] for tag in described["tags"] if tag["description"].endswith(".")}
    operations = [one for methods in described["paths"].values() for one in methods.values()]
    assert len(operations) > 50
    for operation in operations:
        assert operation["summary"] not in ("", "Endpoint") and set(operation["tags"]) <= tags, operation


async def mark(request: StarletteRequest, call_next: Callable[[StarletteRequest], Awaitable[Response]]) -> Response:
    answer = await call_next(request)
    answer.headers["x-mark"] = "function"
    return answer


class MarkedClass(Marked):
    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, "class")


async def test_middleware_is_named_on_the_command_line() -> None:
    app = application()
    add_middleware(app, [f"{__name__}:mark", f"{__name__}.MarkedClass"])
    async with ours(app) as url:
        echoed, counted, _ = await answers(url)
    assert counted.text == "0123" and echoed.headers.get_list("x-mark") == ["function", "class"]


def test_middleware_is_found_in_the_working_directory_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "marks_of_mine.py").write_text("import colorsys\nclass Mine:\n    pass\n")
    (tmp_path / "colorsys.py").write_text("raise SystemExit('not the standard library')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    app = application()
    add_middleware(app, ["marks_of_mine:Mine"])
    assert [entry.cls.__module__ for entry in app.user_middleware] == ["marks_of_mine"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nothing.here:Thing", "No module named 'nothing'"),
        (f"{__name__}:Nothing", "has no attribute 'Nothing'"),
        ("Thing", "give MODULE:NAME"),
        (f"{__name__}:LIMITS", "is neither a class nor a coroutine function"),
    ],
)
def test_what_is_no_middleware(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        add_middleware(application(), [path])
    assert str(refused.value).startswith("--middleware: ")
