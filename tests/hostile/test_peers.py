"""Hostile clients, peers and servers of a cluster: each gets its error, and after each one the next good request is served.

Slow clients, rooms, what a decode worker is told by servers that a request names, and peers that differ. Single requests and
frames that are wrong in themselves: test_every_door.py. After every test a right answer crosses the cluster, and
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
import pytest
import zmq

from bootstrap_server.protocol import Registration, RouteReply
from disagg.metadata import ROW
from tests.e2e.client import generate_all
from tests.e2e.workload import recall_body
from tests.hostile import means, table
from tests.hostile.doors import Answer, Doors, is_refusal, wrong
from tests.hostile.table import CHAT, COMPLETE, GENERATE, PROMPT, USER, post
from transfer_backends.liveness import UNMARKED
from transfer_backends.wire import (
    MAX_ROW_BYTES,
    Abort,
    Bye,
    Drained,
    Message,
    Ping,
    Refused,
    Registered,
    Status,
    TransferInfo,
    decode,
    encode,
)

DOORS = ("router", "prefill", "decode", "unified")


@pytest.fixture(autouse=True)
def served_after(doors: Doors) -> Iterator[None]:
    yield
    doors.serve_well()


def assert_refused(answer: httpx.Response, *statuses: int) -> None:
    assert answer.status_code in (statuses or (400,)), (answer.status_code, answer.text[:500])
    error = answer.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error", error


def test_half_open_requests_stop_no_other(doors: Doors) -> None:
    """Slow loris: a header, or a body, that never ends; hundreds of them."""
    begun = (
        b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nX: ",
        b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    )
    with contextlib.ExitStack() as stack:
        for i in range(400):
            sock = stack.enter_context(means.connect(doors.urls[DOORS[i % len(DOORS)]]))
            sock.sendall(begun[i % 2])
        doors.serve_well(count=8)
        assert doors.alone.post(COMPLETE, {"prompt": "fine", "max_tokens": 5}).json()["choices"][0]["text"] == "fine"


def test_an_unread_answer_stops_no_other(doors: Doors) -> None:
    body = {**PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
    sent = post(GENERATE, body).head(b"127.0.0.1")
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            sock = stack.enter_context(means.connect(doors.urls["router"]))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(sent)
        fine, wanted = recall_body(random.Random(4), 30, max_new_tokens=4)
        assert asyncio.run(generate_all(doors.urls["router"], [fine]))[0]["output_ids"] == wanted


@pytest.mark.parametrize("door", ["prefill", "decode"])
def test_bad_rooms_and_meeting_places(doors: Doors, door: str) -> None:
    good = {**PROMPT, "bootstrap_host": "127.0.0.1", "bootstrap_port": 5, "bootstrap_room": 5}
    rooms = {name: post(GENERATE, {**good, "bootstrap_room": room}) for name, room in table.ROOMS.items()}
    places = {f"{field} {value}": post(GENERATE, {**good, field: value}) for field, value in table.PLACES}

    def names_the_room(answer: Answer) -> bool:
        return answer.status == 400 and is_refusal(answer) and b"bootstrap_room" in answer.body

    assert wrong(doors.play(door, rooms), names_the_room) == {}
    assert wrong(doors.play(door, places), lambda a: a.status == 400 and is_refusal(a)) == {}


@pytest.mark.parametrize("door", ["prefill", "decode"])
async def test_a_room_that_is_live_is_refused(doors: Doors, door: str) -> None:
    """And the request that has it is not disturbed: its other half comes late, and it is answered."""
    port = int(means.bootstrap_url(doors.cluster).rpartition(":")[2])
    body, wanted = recall_body(random.Random(9), 40, max_new_tokens=3)
    body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 4242 + (door == "decode")}
    here, there = doors.urls[door], doors.urls["decode" if door == "prefill" else "prefill"]
    first = asyncio.create_task(generate_all(here, [body]))
    while (await asyncio.to_thread(_live_requests, here)) == 0 and not first.done():
        await asyncio.sleep(0.01)
    answer = await asyncio.to_thread(httpx.post, here + GENERATE, json=body, timeout=30)
    assert_refused(answer, 409)
    assert str(body["bootstrap_room"]) in answer.text and not first.done()
    other, own = await generate_all(there, [body]), await first
    assert (other if door == "prefill" else own)[0]["output_ids"] == wanted


def _live_requests(url: str) -> float:
    state = httpx.get(f"{url}/check").json()
    return float(state["gauges"]["live"] + sum(state["queues"].values()))


@pytest.mark.parametrize(
    ("path", "body"), [(GENERATE, {"text": ["k17", "k18"]}), (COMPLETE, {"prompt": "k17"}), (CHAT, USER)]
)
def test_a_bootstrap_server_that_the_worker_does_not_know_is_not_asked(doors: Doors, path: str, body: Any) -> None:
    """An address that leads here, and is no loopback address: no connection comes."""
    with means.trap("0.0.0.0") as port:
        meeting = {"bootstrap_host": "0.0.0.0", "bootstrap_port": port, "bootstrap_room": 77}
        assert_refused(answer := httpx.post(doors.urls["decode"] + path, json={**body, **meeting}, timeout=30))
        assert answer.json()["error"]["param"] == "bootstrap_host", answer.text


async def test_what_lies_about_prefill_fails_in_bounded_time_and_slows_no_request(doors: Doors) -> None:
    """Bootstrap servers: dead; lying; naming control planes that answer a decode worker's registration in every wrong way."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(means.lying_bootstrap_server(*lie)) for lie in table.LIES.values()]
        places = [(host, 1) for host in table.DEAD * 4] + [("127.0.0.1", port) for port in ports]
        bad = [asyncio.create_task(_ask(doors, place, room=700 + i)) for i, place in enumerate(places)]
        bad += [asyncio.create_task(_ask_for(doors, reply, room=78 + i)) for i, reply in enumerate(table.REPLIES)]
        fine, wanted = recall_body(random.Random(8), 30, max_new_tokens=3)
        assert (await generate_all(doors.urls["router"], [fine]))[0]["output_ids"] == wanted
        answers = await asyncio.gather(*bad)
    said = ["bootstrap"] * len(table.DEAD * 4) + [""] * len(table.LIES) + list(table.REPLIES.values())
    for name, words, answer in zip([*places, *table.REPLIES], said, answers, strict=True):
        message = answer.json()["error"]["message"]
        assert 400 <= answer.status_code <= 503 and message and words in message, (name, answer.text[:500])


async def _ask(doors: Doors, place: tuple[str, int], *, room: int) -> httpx.Response:
    meeting = dict(zip(("bootstrap_host", "bootstrap_port"), place, strict=True))
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(doors.urls["decode"] + GENERATE, json={**PROMPT, **meeting, "bootstrap_room": room})


async def _ask_for(doors: Doors, reply: str, *, room: int) -> httpx.Response:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as control:
        control.setsockopt(zmq.LINGER, 0)
        number = control.bind_to_random_port("tcp://127.0.0.1")
        false = msgspec.structs.replace(means.route(doors.cluster), control_port=number, incarnation=f"false-{reply}")
        with means.lying_bootstrap_server(200, msgspec.json.encode(RouteReply(false, False))) as port:
            asked = asyncio.create_task(_ask(doors, ("127.0.0.1", port), room=room))
            await _answer_falsely(asked, control, false, reply, room)
            return await asked


async def _answer_falsely(
    asked: "asyncio.Task[httpx.Response]", control: "zmq.Socket[bytes]", false: Registration, reply: str, room: int
) -> None:
    while not asked.done():
        if not control.poll(0):
            await asyncio.sleep(0.01)
            continue
        link, data = control.recv_multipart()
        for frame in _false_frames(reply, decode(data), me=false.incarnation, room=room):
            with contextlib.suppress(zmq.ZMQError):
                control.send_multipart([link, frame])


def _false_frames(reply: str, said: Message, *, me: str, room: int) -> list[bytes]:
    them = said.src
    if reply == "junk":
        return [b"", b"\xc1", b"\x90", random.Random(2).randbytes(1000)]
    if reply == "refusal":
        return [encode(Refused(me, them, "not with you", False))]
    if reply == "stranger":
        return [encode(Ping("somebody", them, 1)), encode(Drained(me, "nobody", room, 0))]
    if reply == "success-at-once":
        return [encode(Status(me, them, room, 0, 4, 1)), encode(Status(me, them, 1, 0, 4, 2**62))]
    if reply in ("odd-rows", "row-of-no-room"):
        return _false_rows(said, me, odd=reply == "odd-rows")
    return []


def _false_rows(said: Message, me: str, *, odd: bool) -> list[bytes]:
    """A worker that registers as it should, and writes nothing. `odd`: rows too long, too early and too short; else a zero one."""
    if not isinstance(said, TransferInfo):
        return [encode(Registered(me, said.src, (UNMARKED,)))]
    given, size = len(said.pages) // 4, ROW.itemsize
    rows = [(4, MAX_ROW_BYTES + 1), (3, size), (4, size - 1)] if odd else [(4, size)]
    return [encode(Status(me, said.src, said.room, 0, state, given, "", 0, bytes(n))) for state, n in rows]


@pytest.mark.parametrize("name", table.LAYOUTS)
def test_a_peer_that_differs_is_refused_with_both_values(doors: Doors, name: str) -> None:
    changes, said = table.LAYOUTS[name]
    worker = means.route(doors.cluster)
    with means.dealer(worker.control) as sock:
        sock.send(means.register(worker, **changes))
        answer = decode(sock.recv())
    assert isinstance(answer, Refused) and said in answer.reason, answer


def test_messages_of_strangers_are_refused(doors: Doors) -> None:
    worker = means.route(doors.cluster)
    me, them = "stranger", worker.incarnation
    messages = [
        TransferInfo(me, them, 5, 0, b"\x01\x00\x00\x00", 0),
        Abort(me, them, 5, 0, "because"),
        Status(me, them, 5, 0, 4, 1),
        Ping(me, them, 1),
        Drained(me, them, 5, 0),
    ]
    with means.dealer(worker.control) as sock:
        for message in messages:
            sock.send(encode(message))
            assert isinstance(decode(sock.recv()), Refused)
        sock.send(encode(Bye(me, them)))


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.PUSH, zmq.PAIR], ids=["sub", "push", "pair"])
def test_sockets_of_the_wrong_kind(doors: Doors, kind: int) -> None:
    with means.dealer(means.route(doors.cluster).control, kind):
        doors.serve_well()


def test_a_flood_of_frames_stops_no_request(doors: Doors) -> None:
    with means.dealer(means.route(doors.cluster).control) as sock:
        for _ in range(20_000):
            with contextlib.suppress(zmq.Again):
                sock.send(b"junk", zmq.DONTWAIT)
        doors.serve_well()
