"""Malformed and hostile input at every door: each gets its error, and after each one the next good request is served.

Doors: HTTP of the router and of both workers, the control plane, the bootstrap server, and what a decode worker is told
by servers that a request names. After every case a right answer crosses the cluster, and all memory is back.
"""

import asyncio
import contextlib
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import msgspec
import psutil
import pytest
import zmq

from bootstrap_server.protocol import Registration, RouteReply
from tests.e2e import hostile
from tests.e2e.client import assert_all_back, generate_all
from tests.e2e.cluster import Cluster, cluster, wait_until
from tests.e2e.conftest import SHIPPED
from tests.e2e.workload import recall_body
from transfer_backends.wire import Abort, Bye, Drained, Ping, Refused, Status, TransferInfo, decode

HANDSHAKE_S = 2
# A traceback that is not aiohttp's own about bytes that it could not parse (which it has answered with a 400).
OUR_BUG = re.compile(
    r"^(?!.*(Error handling request from|aiohttp.server: Unhandled|ERROR Unhandled)).*\nTraceback", re.MULTILINE
)
DOORS = ("router", "prefill", "decode")
CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
PROMPT = {"text": "k17 v42 k17"}
USER = {"messages": [{"role": "user", "content": "k17"}]}


@pytest.fixture(scope="module")
def c(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hostile")
    args = ("--disaggregation-handshake-timeout", str(HANDSHAKE_S), "--run-dir", str(folder / "logs"), *SHIPPED)
    with cluster(folder, "--transfer-backend", "nixl", *args) as started:
        family = psutil.Process(started.launcher.pid).children(recursive=True)
        yield started
        assert all(process.is_running() for process in family), "a process has ended"
        for log in (folder / "logs").iterdir():
            found = OUR_BUG.search(log.read_text())
            assert found is None, f"{log}: {found and found.string[found.start() : found.end() + 3000]}"


@pytest.fixture(autouse=True)
def served_after(c: Cluster) -> Iterator[None]:
    yield
    serve_well(c)


def serve_well(c: Cluster, count: int = 2) -> None:
    """Right answers, and everything back."""
    rng = random.Random(1)
    drawn = [recall_body(rng, rng.randint(5, 60), max_new_tokens=3) for _ in range(count)]
    answers = asyncio.run(generate_all(c.router, [body for body, _ in drawn]))
    assert [answer["output_ids"] for answer in answers] == [wanted for _, wanted in drawn]
    asyncio.run(assert_all_back(c))


def url_of(c: Cluster, door: str) -> str:
    return c.router if door == "router" else c.of(door)[0].url


# ---- HTTP

RAW_BODIES: dict[str, tuple[str, bytes]] = {
    "empty": (GENERATE, b""),
    "half-an-object": (CHAT, b'{"messages": ['),
    "list": (GENERATE, b"[]"),
    "null": (COMPLETE, b"null"),
    "number": (GENERATE, b"7"),
    "nan": (GENERATE, b'{"text": "k17", "sampling_params": {"temperature": NaN}}'),
    "infinity": (COMPLETE, b'{"prompt": "k17", "temperature": 1e999}'),
    "not-utf-8": (GENERATE, b'{"text": "\xff\xfe\xc3("}'),
    "lone-surrogate": (COMPLETE, b'{"prompt": "\\ud800"}'),
    "nul-bytes": (GENERATE, b"\x00" * 4096),
    "deep-lists": (GENERATE, b'{"text": "k17", "x": ' + b"[" * 200_000),
    "deep-and-whole": (COMPLETE, b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "deep-objects": (CHAT, b'{"messages": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}"),
    "form": (GENERATE, b"text=k17&n=2"),
    "pickle": (GENERATE, b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."),
}
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "text-is-a-number": (GENERATE, {"text": 5}),
    "text-and-ids": (GENERATE, {**PROMPT, "input_ids": [1]}),
    "mixed-ids": (GENERATE, {"input_ids": [1, [2]]}),
    "id-outside": (GENERATE, {"input_ids": [10**6]}),
    "id-negative": (GENERATE, {"input_ids": [-1]}),
    "id-huge": (GENERATE, {"input_ids": [10**40]}),
    "huge-n": (GENERATE, {**PROMPT, "sampling_params": {"n": 10**12}}),
    "n-4096": (GENERATE, {**PROMPT, "sampling_params": {"n": 4096}}),
    "n-true": (CHAT, {**USER, "n": True}),
    "huge-new-tokens": (GENERATE, {**PROMPT, "sampling_params": {"max_new_tokens": 10**18}}),
    "long-stop": (COMPLETE, {"prompt": "k17", "stop": "x" * 10_000_000}),
    "many-stops": (COMPLETE, {"prompt": "k17", "stop": ["x"] * 100_000}),
    "huge-seed": (CHAT, {**USER, "seed": 2**80}),
    "huge-bias": (CHAT, {**USER, "logit_bias": {"17": 1e300}}),
    "too-long": (GENERATE, {"input_ids": [20] * 40_000}),
    "too-many-prompts": (GENERATE, {"input_ids": [[20]] * 5000}),
    "deep-template": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    "rid-object": (GENERATE, {**PROMPT, "rid": {"$ne": 1}}),
    "sampling-list": (GENERATE, {**PROMPT, "sampling_params": [1, 2]}),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", RAW_BODIES)
def test_a_body_that_is_no_request(c: Cluster, name: str, door: str) -> None:
    path, body = RAW_BODIES[name]
    assert_refused(httpx.post(url_of(c, door) + path, content=body, timeout=30))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_field(c: Cluster, name: str, door: str) -> None:
    path, fields = FIELDS[name]
    meeting = {} if door == "router" else {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 5}
    assert_refused(httpx.post(url_of(c, door) + path, content=json.dumps({**fields, **meeting}), timeout=30))


def assert_refused(answer: httpx.Response, *statuses: int) -> None:
    """An error in OpenAI's shape."""
    assert answer.status_code in (statuses or (400,)), (answer.status_code, answer.text[:500])
    error = answer.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error", error


BYTES: dict[str, bytes] = {
    "http2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "tls-hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "noise": random.Random(0).randbytes(5000),
    "no-host-no-version": b"GET\r\n\r\n",
    "negative-length": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    "length-and-chunks": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "cut-off-body": b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"text": "k1',
    "cut-off-chunks": b'POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{"text": "k1',
    "wrong-chunk": b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "long-header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "many-headers": b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(100_000)) + b"\r\n",
    "bad-gzip": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
    "claimed-terabyte": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1099511627776\r\n\r\n{}",
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_no_http(c: Cluster, name: str, door: str) -> None:
    status = hostile.exchange(url_of(c, door), BYTES[name]).split(b"\r\n")[0]
    assert status == b"" or status.split()[1] in (b"400", b"413", b"431"), status


def test_half_open_requests_stop_nobody(c: Cluster) -> None:
    """Slow loris: a header, or a body, that never ends; hundreds of them."""
    begun = (
        b"POST /generate HTTP/1.1\r\nHost: x\r\nX: ",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    )
    with contextlib.ExitStack() as stack:
        for i in range(300):
            sock = stack.enter_context(hostile.connect(url_of(c, DOORS[i % 3])))
            sock.sendall(begun[i % 2])
        start_s = time.monotonic()
        serve_well(c, count=8)
        assert time.monotonic() - start_s < 10


def test_an_answer_that_nobody_reads_stops_nobody(c: Cluster) -> None:
    """A client that asks for much and reads nothing."""
    body = json.dumps(
        {**PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
    ).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            sock = stack.enter_context(hostile.connect(c.router))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(head + body)
        rng = random.Random(4)
        fine, wanted = recall_body(rng, 30, max_new_tokens=4)
        assert asyncio.run(generate_all(c.router, [fine]))[0]["output_ids"] == wanted


# ---- rooms

ROOMS: dict[str, Any] = {
    "missing": None,
    "zero": 0,
    "negative": -1,
    "too-large": 2**63,
    "far-too-large": 10**40,
    "string": "5",
    "float": 1.5,
    "object": {},
    "true": True,
    "list-of-wrong-length": [1, 2, 3],
    "list-of-strings": ["1"],
}


@pytest.mark.parametrize("door", ["prefill", "decode"])
@pytest.mark.parametrize("name", ROOMS)
def test_a_bad_room(c: Cluster, name: str, door: str) -> None:
    body = {**PROMPT, "bootstrap_host": "127.0.0.1", "bootstrap_port": 5, "bootstrap_room": ROOMS[name]}
    answer = httpx.post(url_of(c, door) + GENERATE, json=body, timeout=30)
    assert_refused(answer, 400, 409)
    assert "bootstrap_room" in answer.text


PLACES: list[tuple[str, Any]] = [
    *(("bootstrap_port", port) for port in (0, -1, 70_000, 10**40, "5", 1.5, [], {"a": 1})),
    *(("bootstrap_host", host) for host in (0, -1, [], ["a", "b"], {"a": 1})),
]


@pytest.mark.parametrize("door", ["prefill", "decode"])
@pytest.mark.parametrize(("field", "value"), PLACES)
def test_a_bad_meeting_place(c: Cluster, field: str, value: Any, door: str) -> None:
    body = {**PROMPT, "bootstrap_host": "127.0.0.1", "bootstrap_port": 5, "bootstrap_room": 5, field: value}
    assert_refused(httpx.post(url_of(c, door) + GENERATE, json=body, timeout=30))


@pytest.mark.parametrize("door", ["prefill", "decode"])
def test_a_room_that_is_live_is_refused(c: Cluster, door: str) -> None:
    """And the request that has it is not disturbed: its other half comes late, and it is answered."""
    port = int(hostile.bootstrap_url(c).rpartition(":")[2])
    body, wanted = recall_body(random.Random(9), 40, max_new_tokens=3)
    body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 4242 + (door == "decode")}

    async def meet() -> dict[str, Any]:
        here, there = url_of(c, door), url_of(c, "decode" if door == "prefill" else "prefill")
        first = asyncio.create_task(generate_all(here, [body]))
        while (await asyncio.to_thread(_live_requests, here)) == 0 and not first.done():
            await asyncio.sleep(0.01)
        answer = await asyncio.to_thread(httpx.post, here + GENERATE, json=body, timeout=30)
        assert_refused(answer, 409)
        assert str(body["bootstrap_room"]) in answer.text and not first.done()
        other = await generate_all(there, [body])
        return {door: (await first)[0], "other": other[0]}["other" if door == "prefill" else "decode"]

    assert asyncio.run(meet())["output_ids"] == wanted


def _live_requests(url: str) -> float:
    return float(httpx.get(f"{url}/check").json()["gauges"]["live"]) + sum(
        httpx.get(f"{url}/check").json()["queues"].values()
    )


# ---- meeting places that are dead or lie

DEAD = ("127.0.0.1", "no-such-host.invalid", "x" * 5000, "a b\r\nc", "::1", "", "%00")
LIES: dict[str, tuple[int, bytes]] = {
    "junk": (200, b"\x00\xff junk"),
    "empty": (200, b""),
    "wrong-shape": (200, b'{"worker": 5, "shared": "maybe"}'),
    "deep": (200, b"[" * 100_000),
    "huge": (200, b'"' + b"x" * 30_000_000 + b'"'),
    "redirect": (302, b""),
    "teapot": (418, b'{"error": "short and stout"}'),
    "broken": (500, b"<html>"),
}
REPLIES = ("silence", "junk", "refusal", "stranger", "success-at-once")


def test_dead_bootstrap_hosts_fail_in_bounded_time_and_slow_nobody(c: Cluster) -> None:
    bodies = [
        {**PROMPT, "bootstrap_host": host, "bootstrap_port": 1, "bootstrap_room": 900 + i}
        for i, host in enumerate(DEAD * 4)
    ]
    for answer in asyncio.run(_fail_beside_a_good_one(c, bodies)):
        assert 400 <= answer.status_code <= 503 and "bootstrap" in answer.json()["error"]["message"], answer.text[:500]


@pytest.mark.parametrize(
    ("path", "body"), [(GENERATE, {"text": ["k17", "k18"]}), (COMPLETE, {"prompt": "k17"}), (CHAT, USER)]
)
def test_a_bootstrap_server_that_the_worker_does_not_know_is_not_asked(c: Cluster, path: str, body: Any) -> None:
    """An address that leads here, and is no loopback address: no connection comes."""
    with socket.create_server(("0.0.0.0", 0)) as trap:
        trap.settimeout(0.0)
        meeting = {"bootstrap_host": "0.0.0.0", "bootstrap_port": trap.getsockname()[1], "bootstrap_room": 77}
        assert_refused(answer := httpx.post(url_of(c, "decode") + path, json={**body, **meeting}, timeout=30))
        assert answer.json()["error"]["param"] == "bootstrap_host", answer.text
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_bootstrap_servers_that_lie(c: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(hostile.lying_bootstrap_server(*lie)) for lie in LIES.values()]
        meetings = [{"bootstrap_port": port, "bootstrap_room": 700 + i} for i, port in enumerate(ports)]
        bodies = [{**PROMPT, "bootstrap_host": "127.0.0.1", **meeting} for meeting in meetings]
        answers = asyncio.run(_fail_beside_a_good_one(c, bodies))
    for name, answer in zip(LIES, answers, strict=True):
        assert 400 <= answer.status_code <= 503 and answer.json()["error"]["message"], (name, answer.text[:500])


async def _fail_beside_a_good_one(c: Cluster, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """The answers to `bodies`, sent to the decode worker; meanwhile a good request is as fast as ever."""
    start_s = time.monotonic()
    async with httpx.AsyncClient(timeout=30) as http:
        bad = [asyncio.create_task(http.post(url_of(c, "decode") + GENERATE, json=body)) for body in bodies]
        fine, wanted = recall_body(random.Random(8), 30, max_new_tokens=3)
        assert (await generate_all(c.router, [fine]))[0]["output_ids"] == wanted
        assert time.monotonic() - start_s < HANDSHAKE_S
        answers = await asyncio.gather(*bad)
    assert time.monotonic() - start_s < HANDSHAKE_S + 5
    return answers


def test_false_prefill_workers(c: Cluster) -> None:
    """Bootstrap servers that name control planes which answer a decode worker's registration in every wrong way."""

    async def ask_all() -> list[httpx.Response]:
        return await asyncio.gather(*(_ask_for(c, reply, room=78 + i) for i, reply in enumerate(REPLIES)))

    for reply, answer in zip(REPLIES, asyncio.run(ask_all()), strict=True):
        assert 400 <= answer.status_code <= 503 and answer.json()["error"]["message"], (reply, answer.text)


async def _ask_for(c: Cluster, reply: str, *, room: int) -> httpx.Response:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as control:
        control.setsockopt(zmq.LINGER, 0)
        number = control.bind_to_random_port("tcp://127.0.0.1")
        false = msgspec.structs.replace(hostile.route(c), control_port=number, incarnation=f"false-{reply}")
        with hostile.lying_bootstrap_server(200, msgspec.json.encode(RouteReply(false, False))) as port:
            body = {**PROMPT, "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
            return await _answer_falsely(c, body, control, false, reply)


async def _answer_falsely(
    c: Cluster, body: dict[str, Any], control: "zmq.Socket[bytes]", false: Registration, reply: str
) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as http:
        asked = asyncio.create_task(http.post(url_of(c, "decode") + GENERATE, json=body))
        while not asked.done():
            if not control.poll(0):
                await asyncio.sleep(0.01)
                continue
            link, data = control.recv_multipart()
            for frame in _false_frames(reply, me=false.incarnation, them=decode(data).src):
                with contextlib.suppress(zmq.ZMQError):
                    control.send_multipart([link, frame])
        return await asked


def _false_frames(reply: str, *, me: str, them: str) -> list[bytes]:
    if reply == "junk":
        return [b"", b"\xc1", b"\x90", random.Random(2).randbytes(1000)]
    if reply == "refusal":
        return [hostile.frame(Refused(me, them, "not with you", False))]
    if reply == "stranger":
        return [hostile.frame(Ping("somebody", them, 1)), hostile.frame(Drained(me, "nobody", 78, 0))]
    if reply == "success-at-once":
        return [hostile.frame(Status(me, them, 78, 0, 4, 1)), hostile.frame(Status(me, them, 1, 0, 4, 2**62))]
    return []


# ---- control plane

GREETING = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00NULL" + b"\x00" * 48
TCP_JUNK: dict[str, bytes] = {
    "noise": random.Random(1).randbytes(10_000),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": b"\x00" * 10_000,
    "greeting-and-noise": GREETING + random.Random(2).randbytes(10_000),
    "greeting-and-huge-frame": GREETING + b"\x02\xff\xff\xff\xff\xff\xff\xff\xff",
    "half-a-greeting": GREETING[:20],
}
FRAMES: dict[str, list[bytes]] = {
    "empty": [b""],
    "noise": [random.Random(3).randbytes(1000)],
    "reserved-code": [b"\xc1"],
    "nil": [msgspec.msgpack.encode(None)],
    "map": [msgspec.msgpack.encode({"type": "Register"})],
    "unknown-tag": [msgspec.msgpack.encode(["Shutdown", "a", "b"])],
    "too-few-fields": [msgspec.msgpack.encode(["Register", "a", "b"])],
    "wrong-types": [msgspec.msgpack.encode(["Ping", 1, 2, "x"])],
    "too-many-fields": [msgspec.msgpack.encode(["Ping", "a", "b", 1, 2])],
    "deep": [b"\x91" * 100_000],
    "false-length": [b"\xdd\xff\xff\xff\xff"],
    "over-the-limit": [b"x" * (9 << 20)],
    "many-parts": [b"a", b"b", b"c"],
}


@pytest.mark.parametrize("name", TCP_JUNK)
def test_tcp_junk_at_the_control_plane(c: Cluster, name: str) -> None:
    address = hostile.route(c).control
    with hostile.connect(address) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(TCP_JUNK[name])
    serve_well(c)


@pytest.mark.parametrize("name", FRAMES)
def test_junk_frames_at_the_control_plane(c: Cluster, name: str) -> None:
    before = _counter(c, "junk_frames")
    with hostile.dealer(hostile.route(c).control) as sock:
        sock.send_multipart(FRAMES[name])
        if name != "over-the-limit":  # ZMQ itself ends that connection
            wait_until(lambda: _counter(c, "junk_frames") > before, within_s=10, what="counted as junk")


def _counter(c: Cluster, name: str) -> float:
    return float(httpx.get(f"{url_of(c, 'prefill')}/check").json()["counters"].get(name, 0))


LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": 99}, "version"),
    "signature": ({"signature": "another model"}, "another model"),
    "page-size": ({"page_size": 64}, "page_size"),
    "dtype": ({"dtype": "float64"}, "float64"),
    "backend": ({"backend": "mooncake"}, "mooncake"),
    "incarnation": ({"dst": "an earlier life"}, "restarted"),
    "bytes": ({}, "bytes"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_peer_that_differs_is_refused_with_both_values(c: Cluster, name: str) -> None:
    changes, said = LAYOUTS[name]
    worker = hostile.route(c)
    with hostile.dealer(worker.control) as sock:
        sock.send(hostile.register(worker, **changes))
        answer = decode(sock.recv())
    assert isinstance(answer, Refused) and said in answer.reason, answer


def test_messages_of_strangers_are_refused(c: Cluster) -> None:
    worker = hostile.route(c)
    me, them = "stranger", worker.incarnation
    messages = [
        TransferInfo(me, them, 5, 0, b"\x01\x00\x00\x00", 0),
        Abort(me, them, 5, 0, "because"),
        Status(me, them, 5, 0, 4, 1),
        Ping(me, them, 1),
        Drained(me, them, 5, 0),
    ]
    with hostile.dealer(worker.control) as sock:
        for message in messages:
            sock.send(hostile.frame(message))
            assert isinstance(decode(sock.recv()), Refused)
        sock.send(hostile.frame(Bye(me, them)))


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.PUSH, zmq.PAIR], ids=["sub", "push", "pair"])
def test_sockets_of_the_wrong_kind(c: Cluster, kind: int) -> None:
    with hostile.dealer(hostile.route(c).control, kind):
        serve_well(c)


def test_a_flood_of_frames_stops_nobody(c: Cluster) -> None:
    with hostile.dealer(hostile.route(c).control) as sock:
        for _ in range(20_000):
            with contextlib.suppress(zmq.Again):
                sock.send(b"junk", zmq.DONTWAIT)
        serve_well(c)


# ---- bootstrap server

GOOD = {
    "incarnation": "x",
    "control_host": "127.0.0.1",
    "control_port": 1,
    "protocol_version": 1,
    "page_size": 16,
    "signature": "s",
    "dtype": "bfloat16",
}
CALLS: dict[str, tuple[str, str, bytes, int]] = {
    "junk": ("PUT", "/route", b"\xff\x00", 400),
    "empty": ("PUT", "/route", b"", 400),
    "list": ("PUT", "/route", b"[]", 400),
    "deep": ("PUT", "/route", b"[" * 100_000, 400),
    "huge": ("PUT", "/route", b" " * (2 << 20), 413),
    "unknown-field": ("PUT", "/route", json.dumps({**GOOD, "admin": True}).encode(), 400),
    "port-0": ("PUT", "/route", json.dumps({**GOOD, "control_port": 0}).encode(), 400),
    "port-string": ("PUT", "/route", json.dumps({**GOOD, "control_port": "1"}).encode(), 400),
    "wrong-role": ("PUT", "/route", json.dumps({**GOOD, "role": "decode"}).encode(), 400),
    "long-name": ("PUT", "/route", json.dumps({**GOOD, "incarnation": "x" * 300}).encode(), 400),
    "no-room": ("GET", "/route", b"", 400),
    "room-0": ("GET", "/route?room=0", b"", 400),
    "room-word": ("GET", "/route?room=five", b"", 400),
    "room-huge": ("GET", "/route?room=99999999999999999999", b"", 400),
    "room-unicode": ("GET", "/route?room=%D9%A3", b"", 400),
    "leave-unnamed": ("DELETE", "/route", b"", 400),
    "leave-stranger": ("DELETE", "/route?incarnation=nobody", b"", 404),
    "rooms-of-a-stranger": ("POST", "/rooms", b'{"incarnation": "nobody", "rooms": [1]}', 404),
    "rooms-junk": ("POST", "/rooms", b'{"incarnation": "nobody", "rooms": ["1"]}', 400),
    "too-many-rooms": ("POST", "/rooms", json.dumps({"incarnation": "x", "rooms": [1] * 5000}).encode(), 400),
    "wrong-method": ("POST", "/route", b"{}", 405),
    "wrong-place": ("GET", "/../etc/passwd", b"", 404),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_bootstrap_call(c: Cluster, name: str) -> None:
    method, path, body, status = CALLS[name]
    answer = httpx.request(method, hostile.bootstrap_url(c) + path, content=body, timeout=30)
    assert answer.status_code == status and answer.json()["error"], (answer.status_code, answer.text[:300])


@pytest.mark.parametrize("name", ["http2-preface", "noise", "cut-off-chunks", "wrong-chunk", "many-headers"])
def test_bytes_that_are_no_http_at_the_bootstrap_server(c: Cluster, name: str) -> None:
    status = hostile.exchange(hostile.bootstrap_url(c), BYTES[name].replace(b"/generate", b"/route")).split(b"\r\n")[0]
    assert status == b"" or status.split()[1][:1] == b"4", status
