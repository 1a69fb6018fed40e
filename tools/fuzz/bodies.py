"""Fuzzed calls at real bootstrap servers: an input is one HTTP request. Every one gets a status and a body of ours.

With a secret, a call is signed, unsigned, or carries a damaged or reused signature.
"""

import asyncio
import contextlib
import http.client
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from bootstrap_server.app import BootstrapServer
from bootstrap_server.registry import BootstrapConfig
from service.security.keys import AUTH_HEADER, CHALLENGE_HEADER, Call, Signer
from tests.transfer.rig import until
from tools.fuzz.footprint import SETTLE_S
from tools.fuzz.source import Source, mangled, told

CONFIG = BootstrapConfig(port=0, max_workers=8, max_rooms=64)
STATUSES = frozenset((200, 400, 401, 404, 405, 413, 503))
SECRET = b"sixteen bytes or more"
MAX_CALLS = 40

_TEXTS = ("a", "b", "", "x" * 256, "x" * 257, "é", "\x00", "prefill", "decode", "127.0.0.1", "\ud800", "http://a:1")
_NUMBERS = (0, 1, -1, -2, 65535, 65536, 70_000, 2**31, 2**63 - 1, 2**63, 2**64, 10**40, 1.5)
_RAW = (b"[" * 5000, b'{"a":' * 2000, b"", b"{", b"NaN", b'"\\ud800"', b"\xff\xfe", b" " * (1 << 20), b" " * (2 << 20))
_PLACES = (
    *(("PUT", "/route"), ("GET", "/route"), ("POST", "/rooms")) * 3,
    *(("DELETE", "/route"), ("GET", "/health"), ("POST", "/route"), ("GET", "/nowhere"), ("PATCH", "/rooms")),
    *(("HEAD", "/route"), ("GET", "/../route"), ("PUT", "/route/"), ("OPTIONS", "/route")),
)


def _value(source: Source, depth: int = 2) -> Any:
    kind = source.below(8) if depth else 0
    if kind == 7:
        return {source.pick(_TEXTS): _value(source, depth - 1) for _ in range(source.below(4))}
    if kind == 6:
        return [_value(source, depth - 1) for _ in range(source.below(5))]
    return source.pick((None, True, source.pick(_NUMBERS), source.pick(_TEXTS)))


def _registration(source: Source) -> dict[str, Any]:
    sound = {
        "incarnation": _incarnation(source),
        "control_host": "127.0.0.1",
        "control_port": 1 + source.below(12),
        "protocol_version": 4,
        "page_size": 16,
        "signature": "m",
        "dtype": "f32",
    }
    return sound if not source.once_in(3) else {**sound, "signature": source.pick(_TEXTS)}


def _incarnation(source: Source) -> str:
    return "abcdefghij"[source.below(10)]


def _rooms(source: Source) -> dict[str, Any]:
    return {"incarnation": _incarnation(source), "rooms": [1 + source.below(200) for _ in range(source.below(10))]}


def _body(source: Source) -> bytes:
    kind = source.below(16)
    if kind == 15:
        return source.pick(_RAW)
    if kind == 14:
        return json.dumps(_value(source)).encode()
    value = _registration(source) if source.below(2) else _rooms(source)
    if kind >= 10:
        name = source.pick([*value, source.pick(_TEXTS)])
        value.pop(name, None) if source.below(2) else value.__setitem__(name, _value(source))
    body = json.dumps(value).encode()
    return mangled(source, body) if kind in (8, 9) else body


def _query(source: Source) -> str:
    kind = source.below(8)
    if kind < 4:
        return f"?room={source.below(300) - 5}" + ("&any=1&but=" + ",".join("ab"[: source.below(3)])) * source.below(2)
    if kind < 6:
        return f"?incarnation={_incarnation(source)}"
    if kind == 6:
        return f"?{quote(source.pick(_TEXTS), errors='replace')}={quote(source.pick(_TEXTS), errors='replace')}"
    return f"?room={source.pick(_NUMBERS)}&any={source.pick(_TEXTS[:3])}&but={',' * source.below(100)}"


class Caller:
    """Calls one server over a connection that is kept."""

    def __init__(self, server: BootstrapServer, secret: bytes | None) -> None:
        self.num_inputs = 0
        self.statuses: Counter[int] = Counter()
        self._server = server
        self._signer = None if secret is None else Signer(secret)
        self._used = ""
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        self.run(bytes(8))
        self._tasks_at_rest = self._num_tasks

    def run(self, data: bytes) -> None:
        source = Source(data)
        for _ in range(MAX_CALLS):
            if source.is_empty:
                break
            method, path = source.pick(_PLACES)
            self._call(method, path + _query(source), _body(source), source)
        registry = self._server.registry
        registry.check()
        assert registry.num_workers <= CONFIG.max_workers and registry.num_rooms <= CONFIG.max_rooms

    def _call(self, method: str, path: str, body: bytes, source: Source) -> None:
        self.num_inputs += 1
        headers = {"Content-Type": "application/json"} | self._headers(Call(method, path, body), source)
        self._connection.request(method, path, body or None, headers)
        response = self._connection.getresponse()
        text = response.read()
        self.statuses[response.status] += 1
        if self._signer is not None:
            self._signer.challenge = response.headers.get(CHALLENGE_HEADER, self._signer.challenge)
        assert response.status in STATUSES, (method, path, body[:200], response.status, text[:500])
        answer = json.loads(text) if method != "HEAD" else {"error": ""}
        assert response.status == 200 or set(answer) == {"error"}, (method, path, body[:200], answer)

    def _headers(self, call: Call, source: Source) -> dict[str, str]:
        if self._signer is None:
            return {}
        kind = source.below(12)
        if kind == 11:
            return {}
        if kind == 10:
            return {AUTH_HEADER: self._used}
        self._used = self._signer.sign(call)[0]
        return {AUTH_HEADER: quote(mangled(source, self._used.encode()), safe=":") if kind == 9 else self._used}

    @property
    def _num_tasks(self) -> int:
        """Of the server's loop."""
        return len(asyncio.all_tasks(self._server._loop))

    def result(self) -> str:
        at_rest = self._tasks_at_rest
        until(lambda: self._num_tasks <= at_rest, timeout_s=SETTLE_S, what="its tasks are as many as before")
        return told(self.statuses)

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def called_server(secret: bytes | None) -> Iterator[Caller]:
    server = BootstrapServer(CONFIG, shared=True, secret=secret)
    server.start()
    try:
        with contextlib.closing(Caller(server, secret)) as caller:
            yield caller
    finally:
        server.close()
