"""Measures what the router costs: its own code from a client's bytes to the answer's, and its whole process beside SGLang's router.

In the first, clients and workers are transports that answer in place, so no system call and no other process is in the figure, and on a
busy machine the least of many short windows is steady to a few per cent. In the second, workers answer at once (instant_worker.py).
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any, NamedTuple

import psutil
import uvloop

from benchmarks.cluster import answering
from benchmarks.instant_worker import ANSWER, DONE, EVENT, STREAM_HEAD, chunk, whole
from benchmarks.load import load, request_bytes
from benchmarks.measures import Row, Tables, in_turns, used_s
from deploy.launcher.probe import free_ports
from router.client.upstream import HttpUpstream, _Connection
from router.compose.exposure import limits_of
from router.compose.router import Router
from router.compose.routes import make_app
from router.config import RouterConfig
from router.pool.breaker import Check
from router.server import SHUTDOWN_TIMEOUT_S
from service.http.server import HttpServer

WINDOW = 100  # requests: so short that one of many is not disturbed
EVENTS = 64
WARM_UP_S = 0.5


class Wire(asyncio.Transport):
    """A transport whose other end is a function of what is written."""

    def __init__(self, on_write: Callable[[bytes], object]) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self._on_write = on_write

    def write(self, data: Any) -> None:
        self._on_write(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self._on_write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


def join_worker(upstream: HttpUpstream, url: str, *, answer: bytes) -> None:
    """Add a free connection to a worker that says `answer` to whatever comes."""
    loop, origin = asyncio.get_running_loop(), upstream._origin(url)
    connection = _Connection(upstream, origin)
    connection.connection_made(Wire(lambda _: loop.call_soon(connection.data_received, answer)))
    connection.free_since_s = loop.time()
    upstream.on_free(connection)


class Client:
    """Sends one request after the other over one connection; `serve(n)` returns when n were answered."""

    def __init__(self, server: HttpServer, *, stream: bool) -> None:
        self._request = request_bytes("127.0.0.1", stream=stream)
        self._end = b"0\r\n\r\n" if stream else ANSWER
        self._left = 0
        self._done: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._protocol = server.connect()
        self._protocol.connection_made(Wire(self._on_answer))

    async def serve(self, count: int) -> None:
        self._left, self._done = count, self._loop.create_future()
        self._protocol.data_received(self._request)
        await self._done

    def _on_answer(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200 OK"):
            raise AssertionError(data[:200])
        if not data.endswith(self._end):
            return
        self._left -= 1
        if self._left:
            self._loop.call_soon(self._protocol.data_received, self._request)
        elif self._done is not None:
            self._done.set_result(None)


async def _build(stack: AsyncExitStack, *, stream: bool) -> Client:
    prefill, decode = "http://127.0.0.1:1", "http://127.0.0.1:2"
    config = RouterConfig(pd_disaggregation=True, prefill=((prefill, 8998),), decode=(decode,))
    router = Router(config, None, stack)
    await router.connect(stack)
    for worker in router.table.workers():
        router.table.on_check(worker, Check.OK, now_s=0.0)
    upstream = router.upstream
    events = STREAM_HEAD + chunk(EVENT) * EVENTS + chunk(DONE) + b"0\r\n\r\n"
    join_worker(upstream, prefill, answer=whole(ANSWER))
    join_worker(upstream, decode, answer=events if stream else whole(ANSWER))
    limits = limits_of(config)
    server = HttpServer(make_app(router, limits), limits, shutdown_timeout_s=SHUTDOWN_TIMEOUT_S)
    stack.push_async_callback(server.close)
    return Client(server, stream=stream)


async def windows_us(*, seconds: float, stream: bool) -> list[float]:
    """Return the CPU microseconds of a request in each of many windows."""
    async with AsyncExitStack() as stack:
        client = await _build(stack, stream=stream)
        await client.serve(10 * WINDOW)
        until_s, windows = time.perf_counter() + seconds, []
        while time.perf_counter() < until_s:
            before_s = time.process_time()
            await client.serve(WINDOW)
            windows.append((time.process_time() - before_s) / WINDOW * 1e6)
        return windows


def measure_path(*, seconds: float = 5.0) -> Tables:
    """A whole answer, and one of 64 events."""
    found = {stream: uvloop.run(windows_us(seconds=seconds, stream=stream)) for stream in (False, True)}
    event_us = (min(found[True]) - min(found[False])) / EVENTS
    rows: list[Row] = [
        {"CPU us": title, "whole answer": of(found[False]), "64 events": of(found[True])}
        for title, of in (("a request, the least of many windows", min), ("median", statistics.median))
    ]
    return {"": [*rows, {"CPU us": "each event more", "64 events": event_us}]}


# ---- whole processes


class Load(NamedTuple):
    """`pause_ms`: between a stream's events; None: whole answers."""

    name: str
    clients: int
    pause_ms: float | None


LOADS = (
    Load("whole answers, 1 client", 1, None),
    Load("whole answers, 16 clients", 16, None),
    Load("64 events at once, 16 clients", 16, 0.0),
    Load("64 events, one every 5 ms, 16 clients", 16, 5.0),
)


def tandem(port: int, prefill: int, decode: int) -> list[str]:
    """Our router."""
    return [
        *(sys.executable, "-m", "deploy", "router", "--pd-disaggregation", "--port", str(port), "--log-level", "error"),
        *("--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}"),
    ]


def sglang(port: int, prefill: int, decode: int) -> list[str]:
    """SGLang's router (Rust, from PyPI)."""
    (metrics,) = free_ports(1)
    return [
        *(sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--policy", "random"),
        *("--prefill", f"http://127.0.0.1:{prefill}", "8998", "--decode", f"http://127.0.0.1:{decode}"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--log-level", "error"),
    ]


ROUTERS = {"tandem": tandem, "sglang-router": sglang}


@contextmanager
def instant_workers(pause_ms: float) -> Iterator[tuple[int, int]]:
    """Run a prefill and a decode worker that answer at once; their ports."""
    prefill, decode = free_ports(2)
    with ExitStack() as stack:
        for port, flags in (
            (prefill, ["--mode", "prefill", "--events", "1"]),
            (decode, ["--mode", "decode", "--events", str(EVENTS), "--pause-ms", str(pause_ms)]),
        ):
            argv = [sys.executable, "-m", "benchmarks.instant_worker", str(port), *flags]
            stack.enter_context(answering(argv, f"http://127.0.0.1:{port}/health"))
        yield prefill, decode


def measure_cost(*, seconds: float = 3.0, rounds: int = 3) -> Tables:
    """Each router, and none, under each load."""
    rows: list[Row] = []
    for one in LOADS:
        with ExitStack() as stack:
            workers = stack.enter_context(instant_workers(one.pause_ms or 0.0))
            ports: dict[str, tuple[int, psutil.Process | None]] = {"none": (workers[1], None)}
            for name, argv in ROUTERS.items():
                (port,) = free_ports(1)
                ready = f"http://127.0.0.1:{port}/readiness"
                ports[name] = port, stack.enter_context(answering(argv(port, *workers), ready))
            ways = {name: _way(one, *at, seconds) for name, at in ports.items()}
            rows += [{"load": one.name, "router": name, **row} for name, row in in_turns(ways, rounds).items()]
    return {"": rows}


def _way(one: Load, port: int, router: psutil.Process | None, seconds: float) -> Callable[[], dict[str, float]]:
    url, stream = f"http://127.0.0.1:{port}", one.pause_ms is not None

    def sample() -> dict[str, float]:
        uvloop.run(load(url, clients=one.clients, seconds=WARM_UP_S, stream=stream))
        family = [] if router is None else [router, *router.children(recursive=True)]
        before_s, begin_s = used_s(family), time.perf_counter()
        seen = uvloop.run(load(url, clients=one.clients, seconds=seconds, stream=stream))
        us, wall_s = 1e6 * (used_s(family) - before_s), time.perf_counter() - begin_s
        return {
            "requests/s": len(seen.whole_s) / wall_s,
            "CPU us a request": us / len(seen.whole_s),
            "CPU us an event": us / seen.events if seen.events else 0.0,
            "first byte p50, ms": statistics.median(seen.first_byte_s) * 1e3,
            "p99": statistics.quantiles(seen.first_byte_s, n=100)[98] * 1e3 if len(seen.first_byte_s) > 1 else 0.0,
        }

    return sample
