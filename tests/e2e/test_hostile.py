"""Hostile clients, peers and servers of a cluster: each gets its error, and after each one the next good request is served.

Slow clients, rooms, what a decode worker is told by servers that a request names, and peers that differ. Single requests and
frames that are wrong in themselves: tests/hostile, at every door. After every case a right answer crosses the cluster, and
all memory is back.
"""

import asyncio
import contextlib
import random
import socket
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
from tests.e2e.cluster import Cluster, cluster
from tests.e2e.conftest import SHIPPED
from tests.e2e.workload import recall_body
from tests.hostile.table import post
from transfer_backends.wire import Abort, Bye, Drained, Ping, Refused, Status, TransferInfo, decode

HANDSHAKE_S = 2
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
            assert (found := hostile.our_traceback(log)) is None, found


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


def assert_refused(answer: httpx.Response, *statuses: int) -> None:
    """An error in OpenAI's shape."""
    assert answer.status_code in (statuses or (400,)), (answer.status_code, answer.text[:500])
    error = answer.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error", error


def test_half_open_requests_stop_nobody(c: Cluster) -> None:
    """Slow loris: a header, or a body, that never ends; hundreds of them."""
    begun = (
        b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nX: ",
        b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    )
    with contextlib.ExitStack() as stack:
        for i in range(300):
            sock = stack.enter_context(hostile.connect(url_of(c, DOORS[i % 3])))
            sock.sendall(begun[i % 2])
        serve_well(c, count=8)


def test_an_answer_that_nobody_reads_stops_nobody(c: Cluster) -> None:
    """A client that asks for much and reads nothing."""
    body = {**PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
    sent = post(GENERATE, body).head(b"127.0.0.1")
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            sock = stack.enter_context(hostile.connect(c.router))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(sent)
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
    assert_refused(answer)
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
    """The answers to `bodies`, sent to the decode worker; beside them a good request is answered right."""
    async with httpx.AsyncClient(timeout=60) as http:
        bad = [asyncio.create_task(http.post(url_of(c, "decode") + GENERATE, json=body)) for body in bodies]
        fine, wanted = recall_body(random.Random(8), 30, max_new_tokens=3)
        assert (await generate_all(c.router, [fine]))[0]["output_ids"] == wanted
        answers = await asyncio.gather(*bad)
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
