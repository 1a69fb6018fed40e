"""What the router's own code costs for one request: everything from the client's bytes to the answer's, without sockets.

usage: python -m benchmarks.router_path [--seconds S] [--output FILE]

Clients and workers are transports that answer in place, so no system call and no other process is in the figure: it is the
part that is ours to mend, and on a busy machine the least of many short windows is steady to a few per cent. Where it goes is
told by cProfile, whose own cost falls on small functions: shares are to be read against each other.
"""

import argparse
import asyncio
import cProfile
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.instant_worker import ANSWER, DONE, EVENT, STREAM_HEAD, chunk, whole
from benchmarks.router_load import request_bytes
from deploy.bench.environment import describe
from router.client.upstream import HttpUpstream, _Connection
from router.compose import Router, limits_of
from router.config import RouterConfig
from router.pool.states import Check
from router.server import SHUTDOWN_TIMEOUT_S
from service.http.server import make_runner

WINDOW = 100  # requests: so short that one of many is not disturbed
EVENTS = 64


class Wire(asyncio.Transport):
    """A transport whose other end is a function of what is written."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
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
    """A free connection to a worker that says `answer` to whatever comes."""
    loop, origin = asyncio.get_running_loop(), upstream._origin(url)
    connection = _Connection(upstream, origin)
    connection.connection_made(Wire(lambda data: _later(loop, connection.data_received, answer)))
    connection.free_since_s = loop.time()
    upstream.on_free(connection)


def _later(loop: asyncio.AbstractEventLoop, act: Callable[[bytes], None], data: bytes) -> None:
    loop.call_soon(act, data)


class Client:
    """One request after the other over one connection; `serve(n)` returns when n were answered."""

    def __init__(self, server: Any, *, stream: bool) -> None:
        self._request = request_bytes("127.0.0.1", stream=stream)
        self._stream = stream
        self._left = 0
        self._done: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._protocol = server()
        self._protocol.connection_made(Wire(self._on_answer))

    async def serve(self, count: int) -> None:
        self._left, self._done = count, self._loop.create_future()
        self._protocol.data_received(self._request)
        await self._done

    def _on_answer(self, data: bytes) -> None:
        if not data.startswith(b"HTTP/1.1 200 OK") and not self._stream:
            raise AssertionError(data[:200])
        if self._stream and not data.endswith(b"0\r\n\r\n"):
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
    runner = make_runner(router.handler(), limits_of(config), shutdown_timeout_s=SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    return Client(runner.server, stream=stream)


async def measure(*, seconds: float, stream: bool) -> dict[str, Any]:
    """The least and the median CPU time of a request over windows, and the parts' shares."""
    async with AsyncExitStack() as stack:
        client = await _build(stack, stream=stream)
        await client.serve(10 * WINDOW)
        until_s, windows = time.perf_counter() + seconds, []
        while time.perf_counter() < until_s:
            before_s = time.process_time()
            await client.serve(WINDOW)
            windows.append((time.process_time() - before_s) / WINDOW * 1e6)
        return {"least_us": min(windows), "median_us": statistics.median(windows), "parts": await _parts_of(client)}


PARTS = (  # the first that is in a file's path has its time
    (
        "the client's side: aiohttp's server, deadlines, guard",
        ("aiohttp", "multidict", "service/http/s", "service/http/g", "service/http/r", "http/access", "http/l"),
    ),
    (
        "the workers' side: our client, calls, attempts",
        ("client/upstream", "attempts/upstream_call", "attempts/pair_attempt"),
    ),
    (
        "the dispatcher, answers",
        (
            "requests/dispatch",
            "requests/relay",
            "http/errors",
            "requests/live",
            "attempts/request",
        ),
    ),
    ("bodies", ("router/body", "json_depth")),
    ("keys", ("service/security/", "client/credentials")),
    ("admission, forecast", ("admission/",)),
    ("choice, load, breakers", ("choice/", "pool/")),
    (
        "what is remembered: metrics, dashboard, trace",
        ("metrics", "prometheus", "history/", "service/telemetry/"),
    ),
)


async def _parts_of(client: Client) -> dict[str, float]:
    """Share of each part; what C code takes counts for who called it."""
    profile = cProfile.Profile(time.process_time)
    profile.enable()
    await client.serve(50 * WINDOW)
    profile.disable()
    spent: Counter[str] = Counter()
    for entry in profile.getstats():
        if isinstance(entry.code, str):
            continue
        inside = sum(call.inlinetime for call in entry.calls or () if isinstance(call.code, str))
        if "benchmarks/" not in entry.code.co_filename:
            spent[_part(entry.code.co_filename)] += entry.inlinetime + inside
    return {part: spent[part] / spent.total() for part in [*(name for name, _ in PARTS), "the rest: asyncio, Python"]}


def _part(filename: str) -> str:
    return next((name for name, marks in PARTS if any(mark in filename for mark in marks)), "the rest: asyncio, Python")


def render(result: dict[str, Any]) -> str:
    """Write the section of docs/reports/benchmarks.md."""
    rows = result["rows"]
    lines = [f"| | {' | '.join(rows)} |", "|---" + "|---:" * len(rows) + "|"]
    for name, title in (("least_us", "CPU us/request, the least of many windows"), ("median_us", "median")):
        lines.append(f"| {title} | {' | '.join(format(row[name], '.0f') for row in rows.values())} |")
    for part in next(iter(rows.values()))["parts"]:
        lines.append(f"| {part} | {' | '.join(format(row['parts'][part], '.0%') for row in rows.values())} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = {
        name: uvloop.run(measure(seconds=args.seconds, stream=stream))
        for name, stream in (("whole answer", False), ("64 events at once", True))
    }
    result = {"environment": describe(), "rows": rows}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
