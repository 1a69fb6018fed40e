"""A worker that answers at once, for benchmarks of what stands before it. HTTP/1.1 by hand on uvloop, so that it costs little.

usage: python -m benchmarks.instant_worker PORT [--events N] [--pause-ms MS] [--mode prefill|decode]

A POST whose body holds `"stream":true` is answered with N server-sent events, all at once or one every MS; any other
with a small JSON answer; a GET with 200 and what a worker says of itself.
"""

import argparse
import asyncio
from collections.abc import Mapping
from functools import partial
from typing import cast

import uvloop

ANSWER = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"hello"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}'
)
EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
    b'{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
ABOUT = {  # path -> what it says of itself
    b"/health": b'{"incarnation":"0123456789abcdef"}',
    b"/v1/loads": b'{"loads":[{"num_running_reqs":0,"num_waiting_reqs":0,"num_used_tokens":0,"max_total_num_tokens":1000000}]}',
}
INFO = b'{"served_model_name":"m","disaggregation_mode":"%s","disaggregation_bootstrap_port":8998}'
DONE = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def whole(body: bytes) -> bytes:
    """A whole answer."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class InstantWorker(asyncio.Protocol):
    """One connection."""

    def __init__(self, *, events: int, pause_s: float, about: Mapping[bytes, bytes]) -> None:
        self._events = events
        self._about = about
        self._pause_s = pause_s
        self._seen = b""
        self._streams: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self._streams:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._seen += data
        while (end := self._seen.find(b"\r\n\r\n")) >= 0:
            head = self._seen[:end].lower()
            if b"http/1." not in head:  # the preface of HTTP/2
                return self._transport.close()
            size = _content_length(head)
            if len(self._seen) < end + 4 + size:
                return None
            body = self._seen[end + 4 : end + 4 + size]
            self._seen = self._seen[end + 4 + size :]
            self._answer(head, body)
        return None

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get "):
            self._transport.write(whole(self._about.get(head.split(b" ", 2)[1], b"{}")))
        elif b'"stream":true' not in body and b'"stream": true' not in body:
            self._transport.write(whole(ANSWER))
        elif self._pause_s == 0:
            self._transport.write(STREAM_HEAD)
            for _ in range(self._events):
                self._transport.write(chunk(EVENT))
            self._transport.write(chunk(DONE) + b"0\r\n\r\n")
        else:
            task = asyncio.get_running_loop().create_task(self._paced())
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)

    async def _paced(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport.write(STREAM_HEAD)
        due_s = loop.time()
        for _ in range(self._events):
            due_s += self._pause_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            self._transport.write(chunk(EVENT))
        self._transport.write(chunk(DONE) + b"0\r\n\r\n")


def _content_length(head: bytes) -> int:
    at = head.find(b"content-length:")
    return 0 if at < 0 else int(head[at + 15 :].split(b"\r\n", 1)[0])


async def serve(port: int, *, events: int, pause_s: float, mode: str) -> None:
    loop, about = asyncio.get_running_loop(), {**ABOUT, b"/server_info": INFO % mode.encode()}
    make = partial(InstantWorker, events=events, pause_s=pause_s, about=about)
    server = await loop.create_server(make, "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--events", type=int, default=64)
    parser.add_argument("--pause-ms", type=float, default=0.0)
    parser.add_argument("--mode", default="null", help="the role that it says it has")
    args = parser.parse_args()
    uvloop.run(serve(args.port, events=args.events, pause_s=args.pause_ms / 1e3, mode=args.mode))


if __name__ == "__main__":
    main()
