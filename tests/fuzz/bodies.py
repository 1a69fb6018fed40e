"""Fuzzed calls at a real bootstrap server: an input is one HTTP request. Every one gets a status and a body of ours."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from bootstrap_server.app import BootstrapServer
from bootstrap_server.config import BootstrapConfig

CONFIG = BootstrapConfig(port=0, max_workers=8, max_rooms=64)
STATUSES = frozenset((200, 400, 401, 404, 405, 413, 503))

_TEXT = st.one_of(
    st.sampled_from(["a", "b", "", "x" * 256, "x" * 257, "é", "\x00", "prefill", "127.0.0.1"]), st.text(max_size=6)
)
_NUMBER = st.one_of(st.integers(-2, 70_000), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**40, 1.5]))
_VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBER, _TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXT, inner, max_size=3)),
    max_leaves=8,
)
_GOOD = {
    "incarnation": st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]),
    "control_host": st.just("127.0.0.1"),
    "control_port": st.integers(1, 65535),
    "protocol_version": st.just(1),
    "page_size": st.just(16),
    "signature": st.just("m"),
    "dtype": st.just("f32"),
}
_REGISTRATION = st.fixed_dictionaries(_GOOD)
_ROOMS = st.fixed_dictionaries(
    {"incarnation": _GOOD["incarnation"], "rooms": st.lists(st.integers(1, 200), max_size=9)}
)


@st.composite
def _spoilt(draw: st.DrawFn) -> Any:
    """A sound body with a field changed, missing or too many."""
    body = dict(draw(st.one_of(_REGISTRATION, _ROOMS)))
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.one_of(st.sampled_from(sorted(body) or ["x"]), _TEXT))
        if draw(st.booleans()):
            body.pop(name, None)
        else:
            body[name] = draw(_VALUE)
    return body


_BODY = st.one_of(
    _REGISTRATION.map(json.dumps),
    _ROOMS.map(json.dumps),
    _spoilt().map(json.dumps),
    _VALUE.map(json.dumps),
    st.sampled_from(["[" * 5000, '{"a":' * 2000, "", "{", "NaN", '"\\ud800"']),
).map(lambda text: text.encode("utf-8", "replace"))
_BODIES = st.one_of(_BODY, _BODY, _BODY, st.binary(max_size=40))
_QUERY = st.one_of(
    st.integers(-5, 300).map(lambda room: f"?room={room}"),
    _GOOD["incarnation"].map(lambda name: f"?incarnation={name}"),
    st.tuples(_TEXT, _TEXT).map(lambda pair: "?" + quote(pair[0]) + "=" + quote(pair[1])),
    st.tuples(st.just("room"), _TEXT).map(lambda pair: "?room=" + quote(pair[1])),
    st.just(""),
)
_PLACES = st.sampled_from(
    [
        ("PUT", "/route"),
        ("PUT", "/route"),
        ("GET", "/route"),
        ("GET", "/route"),
        ("DELETE", "/route"),
        ("POST", "/rooms"),
        ("POST", "/rooms"),
        ("GET", "/health"),
        ("POST", "/route"),
        ("GET", "/nowhere"),
        ("PATCH", "/rooms"),
    ]
)
CALLS = st.lists(st.tuples(_PLACES, _QUERY, _BODIES), min_size=5, max_size=30)


class Caller:
    """Calls one server over a connection that is kept."""

    def __init__(self, server: BootstrapServer) -> None:
        self.num_calls = 0
        self.statuses: dict[int, int] = {}
        self._server = server
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)

    def run(self, calls: list[tuple[tuple[str, str], str, bytes]]) -> None:
        for (method, path), query, body in calls:
            self._call(method, path + query, body)
        assert self._server.registry.check() == []
        assert self._server.registry.num_workers <= CONFIG.max_workers
        assert self._server.registry.num_rooms <= CONFIG.max_rooms

    def _call(self, method: str, path: str, body: bytes) -> None:
        self.num_calls += 1
        self._connection.request(method, path, body or None)
        response = self._connection.getresponse()
        answer = json.loads(response.read())
        self.statuses[response.status] = self.statuses.get(response.status, 0) + 1
        assert response.status in STATUSES, (response.status, answer)
        assert response.status == 200 or set(answer) == {"error"}, answer

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def called_server() -> Iterator[Caller]:
    server = BootstrapServer(CONFIG, shared=True)
    server.start()
    try:
        with contextlib.closing(Caller(server)) as caller:
            yield caller
    finally:
        server.close()
