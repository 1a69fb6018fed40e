"""Means of doing harm: raw sockets, a DEALER for the control plane, and a bootstrap server that says what it is told to."""

import contextlib
import errno
import http.server
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx
import msgspec
import pytest
import zmq

from bootstrap_server.protocol import Registration, RouteReply
from engine.kv.page_checksum import NAME as CHECKSUM_NAME
from service.kv_layout import Layout
from tests.e2e.cluster import Cluster
from transfer_backends.contract import RankMemory, Region
from transfer_backends.wire import Register, encode

ANSWER_S = 60.0
# A traceback that is not aiohttp's own about bytes that it could not parse (which it has answered with a 400).
_OUR_BUG = re.compile(
    r"^(?!.*(Error handling request from|aiohttp.server: Unhandled|ERROR Unhandled)).*\nTraceback", re.MULTILINE
)


def our_traceback(log: Path) -> str | None:
    """What a log says of a bug of ours; None: nothing."""
    text = log.read_text()
    found = _OUR_BUG.search(text)
    return None if found is None else f"{log}: {text[found.start() : found.end() + 3000]}"


def exchange(url: str, data: bytes, *, read_s: float = ANSWER_S) -> bytes:
    """Send bytes, half-close, and read until the other side closes. Fails when it keeps the connection open."""
    with connect(url) as sock:
        sock.settimeout(read_s)
        answer = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
            _half_close(sock)
            while chunk := sock.recv(65536):
                answer += chunk
        return answer


def _half_close(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_WR)
    except OSError as error:  # the other side has closed already: read what it said
        if error.errno != errno.ENOTCONN:
            raise


def connect(url: str) -> socket.socket:
    parts = urlsplit(url if "//" in url else f"tcp://{url}")
    return socket.create_connection((parts.hostname, parts.port), timeout=ANSWER_S)


def bootstrap_url(c: Cluster) -> str:
    info = httpx.get(f"{c.of('prefill')[0].url}/server_info").json()
    return f"http://127.0.0.1:{info['disaggregation_bootstrap_port']}"


def route(c: Cluster) -> Registration:
    """Who the prefill worker says it is: its control plane among others."""
    answer = httpx.get(f"{bootstrap_url(c)}/route?room=1")
    return msgspec.json.decode(answer.content, type=RouteReply).worker


@contextlib.contextmanager
def dealer(address: str, kind: int = zmq.DEALER) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.setsockopt(zmq.LINGER, 200)
        sock.setsockopt(zmq.RCVTIMEO, int(ANSWER_S * 1000))
        sock.connect(f"tcp://{address}")
        yield sock


def register(worker: Registration, **changes: object) -> bytes:
    """A decode worker's first message, true but for `changes` (of its layout, or of itself)."""
    given = (worker.protocol_version, "nixl", worker.signature, worker.page_size, worker.dtype)
    layout = Layout(*given, kv_checksum=CHECKSUM_NAME)
    theirs = {k: v for k, v in changes.items() if k in Layout.__struct_fields__}
    region = Region(4096, 16, 16384, None)
    rank = RankMemory(region, 0, 1, 0, 1, b"?")
    message = Register("stranger", worker.incarnation, msgspec.structs.replace(layout, **theirs), (rank,), region)
    own = {k: v for k, v in changes.items() if k in Register.__struct_fields__}
    return encode(msgspec.structs.replace(message, **own))


@contextlib.contextmanager
def trap(host: str) -> Iterator[int]:
    """A port that nobody may connect to."""
    with socket.create_server((host, 0)) as listening:
        yield int(listening.getsockname()[1])
        listening.settimeout(0.0)
        with pytest.raises(BlockingIOError):  # no connection waits
            listening.accept()


@contextlib.contextmanager
def lying_bootstrap_server(status: int, body: bytes) -> Iterator[int]:
    """Answers every GET so; yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
