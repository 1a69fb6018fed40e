"""What a client with a key may try at a router and at a worker, in stories from bytes, while a request of another client runs.

headers       of routers and workers, with junk, or signed with another secret
bodies        that inflate
paths         that lead from a name to other routes
names         of the other's request, to end, block, move, keep or read it

Each call has an answer that is no failure of the server's, none does what needs an admin's key, and after each story the other's request runs on,
until its own client ends it.
"""

import contextlib
import functools
import gzip
import json
import tempfile
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from service.http.image_encoders import ImageEncoder
from service.http.image_encoders import write_header as name_encoders
from service.http.prefix_source import PrefixSourceHeader
from service.http.prefix_source import write_header as name_source
from service.http.request import plain_path
from service.http.resume import sign
from service.security.keys import bearer
from tests.e2e.cluster import Started, tandem
from tests.frontend.conftest import Worker, start_worker
from tests.hostile.doors import Answer, ask
from tests.hostile.table import RESUME, Call, post
from tests.transfer.rig import until
from tools.fuzz.source import Source, mangled, told

MAX_CALLS = 25
MAX_BODY = 1 << 18  # of both servers
SERVED = frozenset((200, 400, 403, 404, 405, 409, 413, 415))
RID, SLOW, BRIEF = "victim", "SLOW", {"max_new_tokens": 1}
_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
ADMINS, PLACES, PIECES, HEADERS = (_DATA[name] for name in ("admins", "places", "pieces", "headers"))
OTHER_SECRET = b"a secret of another cluster"
_RESUME = json.dumps(RESUME).encode()
WORDS = (
    b"-",
    b"1",
    b"0" * 64,
    b"0123456789abcdef-1",
    sign(OTHER_SECRET, _RESUME).encode(),
    name_source(PrefixSourceHeader(control="127.0.0.1:9", incarnation="p", num_tokens=99), OTHER_SECRET).encode(),
    name_encoders([ImageEncoder("127.0.0.1:9", "e")], OTHER_SECRET).encode(),
    b'- {"window_s": 1e300, "owner": "", "body": ""}',
)


@dataclass
class Clients:
    """`doors`: by name, the URL and the worker behind it. `router`: a process of its own. `http`: of the other client."""

    doors: Mapping[str, tuple[str, Worker]]
    router: Started
    http: httpx.Client
    num_inputs: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    _read: dict[Path, int] = field(default_factory=dict)

    def run(self, data: bytes) -> None:
        """One story."""
        source = Source(data)
        url, worker = self.doors[source.pick(("router", "worker"))]
        with _running(self.http, url, worker):
            for _ in range(MAX_CALLS):
                if source.is_empty:
                    break
                self._play(url, _call(source))
            until(lambda: worker.scheduler.num_running == 1, timeout_s=10, what="the other's request alone runs")
        self.assert_sound()

    def assert_sound(self) -> None:
        """No order of an admin has come to the worker behind the router, and no server has met a bug of its own."""
        servers: list[Started | Worker] = [self.router, *(worker for _, worker in self.doors.values())]
        for server in servers:
            assert server.process.poll() is None and "Traceback" not in (said := self._news(server.log)), said
        for _, worker in self.doors.values():
            done = [line for line in worker.http.get("/metrics").text.splitlines() if 'endpoint="/flush_cache"' in line]
            assert not any('status="200"' in line for line in done), done

    def result(self) -> str:
        return told(self.statuses)

    def _news(self, log: Path) -> str:
        """Return what was added to a log since the story before."""
        with log.open(errors="replace") as file:
            file.seek(self._read.get(log, 0))
            text = file.read()
            self._read[log] = file.tell()
        return text

    def _play(self, url: str, call: Call) -> None:
        self.num_inputs += 1
        answer = ask(url, call)
        self.statuses[answer.status] += 1
        _check(call, answer)


def _check(call: Call, answer: Answer) -> None:
    said = (call.method, call.target[:200], call.headers, call.body[:200], answer.status, answer.body[:300])
    assert answer.status in SERVED, said
    path = plain_path(call.target.decode(errors="surrogateescape").partition("?")[0]).removeprefix("/")
    assert answer.status != 200 or path not in (*ADMINS, "kept_stream", "move_out"), said


def _call(source: Source) -> Call:
    made = source.pick((_with_headers, _inflating, _to_a_path, _of_another))(source)
    return Call(made.method, made.target, made.body, (*made.headers, (b"Authorization", b"Bearer two")))


def _with_headers(source: Source) -> Call:
    """The body names what the header would vouch for."""
    names = {source.pick(HEADERS) for _ in range(1 + source.below(3))}
    headers = tuple((name.encode(), _header_value(source)) for name in sorted(names))
    path = source.pick(("/generate", "/v1/completions", "/kept_stream", "/move_out", "/abort_request"))
    body: dict[str, Any] = (
        {"text": "a", "sampling_params": BRIEF} if path == "/generate" else {"prompt": "a", "max_tokens": 1}
    )
    if source.below(2):
        body["resume"] = {**RESUME, source.pick(tuple(RESUME)): source.pick((None, 1, "x", [], [[2**70]], {"a": 1}))}
    return post(path, {**body, "stream": bool(source.below(2))}, *headers)


def _header_value(source: Source) -> bytes:
    value = source.pick(WORDS)
    value = mangled(source, value) if source.once_in(2) else value
    return bytes(c for c in value if c not in b"\r\n\x00")[:4000].strip()


def _inflating(source: Source) -> Call:
    """More than the server takes, or about as much, packed once, twice, or wrongly."""
    size = source.pick((100, MAX_BODY - 200, MAX_BODY + 1, 20 * MAX_BODY))
    kind = source.below(4)
    packed = _packed(size, source.below(3), deflates=kind == 1, twice=kind == 2)
    packed = mangled(source, packed) if kind == 3 else packed
    coding = (b"Content-Encoding", b"deflate" if kind == 1 else source.pick((b"gzip", b"gzip", b"br", b"gzip, gzip")))
    return post(source.pick(("/generate", "/v1/chat/completions", "/tokenize", "/v1/messages")), packed, coding)


@functools.cache
def _packed(size: int, what: int, *, deflates: bool, twice: bool) -> bytes:
    whole = json.dumps({"text": "a" * size, "sampling_params": BRIEF}).encode()
    text = (whole, b" " * size + b"{}", b"[" * size)[what]
    packed = zlib.compress(text, 1) if deflates else gzip.compress(text, 1)
    return gzip.compress(packed) if twice else packed


def _to_a_path(source: Source) -> Call:
    way = "".join(source.pick(PIECES) for _ in range(source.below(7)))
    target = source.pick(PLACES) + way + source.pick((*ADMINS, "server_info", "metrics", "v1/models", "kept_stream"))
    method = source.pick((b"GET", b"POST", b"DELETE", b"HEAD"))
    return Call(method, target.encode("latin-1"), b"{}" if method == b"POST" else b"")


def _of_another(source: Source) -> Call:
    name = source.pick((RID, f"{RID}-0", f"{RID}_0", f"/{RID}", RID.upper()))
    text = {"text": "a", "sampling_params": BRIEF}
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/abort_request", {"rid": name}),
        ("/abort_request", {"abort_all": True}),
        ("/generate", {**text, "rid": name}),
        ("/generate", {**text, "text": ["a", "b"], "rid": [name, "other"]}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "n": 2, "rid": name}),
        ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"num_predict": 1}, "rid": name}),
        ("/move_out", {"samples": [{"rid": name, "room": 1}]}),
        ("/kept_stream", {"request_id": RID, "owner": "", "body": "", "after": "0123456789abcdef-1"}),
        (f"/v1/responses/{name}/cancel", {}),
    )
    path, body = source.pick(bodies)
    owner = source.pick((b"", b"-", b"0" * 64, b"*"))
    headers = ((b"X-Request-Id", RID.encode()), (b"X-Tandem-Caller", owner))
    return post(path, body, *headers[source.below(3) :])


@contextlib.contextmanager
def _running(http: httpx.Client, url: str, worker: Worker) -> Iterator[None]:
    """A request of the client "one", which its client ends at last."""
    body = {"text": SLOW, "stream": True, "rid": RID, "sampling_params": {"max_new_tokens": 50}}
    headers = {**bearer("one"), "X-Request-Id": RID}
    with http.stream("POST", url + "/generate", json=body, headers=headers) as response:
        until(lambda: worker.scheduler.num_running == 1, timeout_s=10, what="the other's request runs")
        yield
        ended = http.post(url + "/abort_request", json={"rid": RID}, headers=bearer("one"))
        assert ended.status_code == 200 and '"abort"' in response.read().decode()
    until(lambda: worker.scheduler.num_running == 0, timeout_s=10, what="it has ended")


@contextlib.contextmanager
def clients() -> Iterator[Clients]:
    """A router with keys before a worker without, and a worker with keys."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        keys = folder / "keys"
        keys.write_text("one\ntwo\n")
        keys.chmod(0o600)
        given = {"api_key_file": str(keys), "admin_api_key": "r00t-key", "max_body_bytes": MAX_BODY}
        limits = {"max_body_bytes": MAX_BODY}
        (folder / "behind").mkdir()
        (folder / "keyed").mkdir()
        behind = stack.enter_context(start_worker(folder / "behind", server=limits))
        keyed = stack.enter_context(start_worker(folder / "keyed", server=given))
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        args = ("router", "--port", "0", "--worker-urls", behind.url, "--log-level", "warning", *flags)
        router = stack.enter_context(tandem(folder / "router", *args))
        http = stack.enter_context(httpx.Client(timeout=60))
        until(lambda: http.get(router.url + "/health").status_code == 200, timeout_s=30, what="the router serves")
        yield Clients({"router": (router.url, behind), "worker": (keyed.url, keyed)}, router, http)
