"""The table of hostile input, played at every door. Each case gets an answer in time, a refusal says why, and nothing else suffers.

Doors: a router of one process, one of two, a unified worker, a prefill and a decode worker, a bootstrap server; the control
plane of the prefill worker. (The sockets between the processes of a worker: tests/engine/test_ipc.py.)
"""

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.client import generate_all
from tests.e2e.cluster import wait_until
from tests.e2e.workload import recall_body
from tests.hostile import means, table
from tests.hostile.doors import (
    ANSWER_S,
    AT_A_TIME,
    ROUTERS,
    SERVERS,
    WORKERS,
    Answer,
    Doors,
    is_no_failure,
    is_refusal,
    names_field,
    wrong,
)
from tests.hostile.table import Call, post
from tests.hostile.wrong_fields import WRONG_FIELDS, wrong_values
from tests.hostile.wrong_messages import WRONG_MESSAGES
from tests.hostile.wrong_ollama import WRONG_OLLAMA

BESIDE_EVERY_S, BESIDE_TOKENS = 1.0, 50
# Routes that every case of `RAW_BODIES` is wrong for.
ANYWHERE = (*table.GENERATION, "/invocations", "/tokenize", "/detokenize", "/traces", "/abort_request")
JSON_ROUTES = {
    "router": (*ANYWHERE, "/workers", "/workers/role", "/workers/migrate"),
    "worker": (*ANYWHERE, "/switch_role", "/move_out"),
    "bootstrap": ("/rooms",),
}
ALL_WRONG_FIELDS = [*WRONG_FIELDS, *WRONG_MESSAGES, *WRONG_OLLAMA]
# HTTP itself is wrong then: it is answered before any handler, or the connection is closed.
OF_THE_LIBRARY = ("Content-Length", "Transfer-Encoding", "Upgrade", "Connection")


@pytest.fixture(scope="module", autouse=True)
def _beside(doors: Doors) -> Iterator[None]:
    with beside(doors.urls):
        yield
        for door in SERVERS:
            watch(doors, door)


@pytest.fixture(autouse=True)
def well_after(doors: Doors, request: pytest.FixtureRequest) -> Iterator[None]:
    door = request.getfixturevalue("door") if "door" in request.fixturenames else None
    yield
    if door is not None:
        watch(doors, door)


def watch(doors: Doors, door: str) -> None:
    """What probes, scrapers and people look at is there."""
    routes: list[tuple[str, str, object]] = [("GET", "/health", None), ("GET", "/metrics", None)]
    if door != "bootstrap":
        routes += [("POST", "/traces", {"last": 64}), ("GET", "/v1/models", None)]
    if door in ROUTERS:
        routes += [("GET", "/dashboard/state", None), ("GET", "/workers", None)]
    for method, path, body in routes:
        answer = doors.http.request(method, doors.urls[door] + path, json=body)
        assert answer.status_code == 200, (door, path, answer.text[:500])


@contextlib.contextmanager
def beside(urls: Mapping[str, str]) -> Iterator[None]:
    """All the while streams go through both routers, and stay right."""
    over = threading.Event()

    def ask_on() -> int:
        rng, count = random.Random(1), 0
        while not over.wait(BESIDE_EVERY_S) or count == 0:
            body, wanted = recall_body(rng, rng.randint(5, 60), max_new_tokens=BESIDE_TOKENS)
            for door in ROUTERS:
                (answer,) = asyncio.run(generate_all(urls[door], [{**body, "stream": True}]))
                assert answer["output_ids"] == wanted, door
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_on)
        try:
            yield
        finally:
            over.set()
        assert asked.result() > 0


def kind_of(door: str) -> str:
    return "router" if door in ROUTERS else "worker" if door in WORKERS else "bootstrap"


def good_calls(door: str) -> list[Call]:
    """Requests that are right but for what is done to them."""
    if door == "bootstrap":
        return [Call(b"GET", b"/route?room=1"), post("/rooms", {"incarnation": "stranger", "rooms": [1]})]
    body = {"input_ids": [1, 20, 21], "sampling_params": {"max_new_tokens": 1}}
    return [post("/generate", body)]  # a prefill or decode worker reads the headers, then misses a room


def at(doors: Iterable[str]) -> pytest.MarkDecorator:
    """A router of two processes runs the code of one, a decode worker that of a prefill worker: `make slow-tests` tries them."""
    marks = {"fleet": pytest.mark.slow, "decode": pytest.mark.slow}
    return pytest.mark.parametrize("door", [pytest.param(door, marks=marks.get(door, ())) for door in doors])


@at(SERVERS)
def test_hostile_headers(doors: Doors, door: str) -> None:
    values = table.HEADER_VALUES
    if door in ("prefill", "decode"):  # they read headers as the unified worker does
        values = {kind: values[kind] for kind in table.BYTES_IN_HEADERS}
    for names in table.HEADERS:
        most = None if len(names) == 1 else 300
        cases = {
            f"{names[0]}: {kind} at {call.target.decode()}": replace(
                call, headers=tuple((n.encode(), value[:most]) for n in names)
            )
            for kind, value in values.items()
            for call in good_calls(door)
        }
        is_fine = (lambda a: a.status == 0 or is_no_failure(a)) if names[0] in OF_THE_LIBRARY else is_no_failure
        assert wrong(doors.play(door, cases), is_fine) == {}
        watch(doors, door)  # at once: later requests push these off the pages that show the last ones


@at(WORKERS)
def test_a_router_s_words_are_taken_from_none_but_a_router(doors: Doors, door: str) -> None:
    """The unified worker has no secret; the others have what `tandem up` made."""
    cases = {
        f"{name} signed {signature!r}": post(path, body, (b"X-Tandem-Resume", signature))
        for name, (path, body) in table.ROUTERS_WORDS.items()
        for signature in table.SIGNATURES
    }
    assert wrong(doors.play(door, cases), lambda a: a.status == 403 and is_refusal(a)) == {}


@at(SERVERS)
def test_a_client_that_waits_for_its_word_sends_its_body(doors: Doors, door: str) -> None:
    """curl asks so before a body of more than 1 MiB, and waits a second in vain where nothing answers."""
    call = post("/rooms" if door == "bootstrap" else "/generate", b"[]", (b"Expect", b"100-Continue"))
    head, _, body = call.head(b"127.0.0.1").partition(b"\r\n\r\n")
    with means.connect(doors.urls[door]) as sock:
        sock.sendall(head + b"\r\n\r\n")
        stream = sock.makefile("rb")
        assert (stream.readline(), stream.readline()) == (b"HTTP/1.1 100 Continue\r\n", b"\r\n")
        sock.sendall(body)
        assert stream.readline().startswith(b"HTTP/1.1 400 ")


@at(SERVERS)
def test_hostile_targets_and_methods(doors: Doors, door: str) -> None:
    cases = {name: Call(b"GET", target) for name, target in table.TARGETS.items()}
    cases |= {repr(method): Call(method, b"/health") for method in table.METHODS}
    answers = doors.play(door, cases)
    assert wrong(answers, lambda a: 400 <= a.status < 500) == {}
    assert b"\nX-Injected" not in b"".join(a.body for a in answers.values())


@at(SERVERS)
def test_what_a_web_page_sends_is_refused(doors: Doors, door: str) -> None:
    """And what it would have changed is as it was."""
    before = state_of(doors, door)
    path = "/rooms" if door == "bootstrap" else "/workers" if door in ROUTERS else "/pause_generation"
    body = {"url": "http://127.0.0.1:9", "role": "decode", "incarnation": "x", "rooms": [1]}
    foreign, here = (b"Origin", b"http://evil.example"), (b"Origin", doors.urls[door].encode())
    rebound = (b"Host", b"evil.example:8000")
    forbidden = {
        "json": post(path, body, foreign),
        "text": post(path, body, foreign, (b"Content-Type", b"text/plain")),
        "null": post(path, body, (b"Origin", b"null")),
        "no-body": Call(b"POST", path.encode(), headers=(foreign,)),
        "link": Call(b"GET", b"/flush_cache", headers=((b"Sec-Fetch-Site", b"cross-site"),)),
        "rebound": Call(b"GET", b"/metrics", headers=(rebound,)),
        "rebound-post": post(path, body, rebound, (b"Origin", b"http://evil.example:8000")),
    }
    unwanted = {"own-text": post(path, body, here, (b"Content-Type", b"text/plain"))}
    assert wrong(doors.play(door, forbidden), lambda a: a.status == 403 and is_refusal(a)) == {}
    assert wrong(doors.play(door, unwanted), lambda a: a.status == 415 and is_refusal(a)) == {}
    assert state_of(doors, door) == before


def state_of(doors: Doors, door: str) -> object:
    if door == "bootstrap":
        return doors.http.get(f"{doors.urls[door]}/health").json()["rooms"]
    if door in ROUTERS:
        return [worker["url"] for worker in doors.http.get(f"{doors.urls[door]}/workers").json()["workers"]]
    return doors.http.get(f"{doors.urls[door]}/health").status_code


@at(SERVERS)
def test_bodies_that_are_no_request(doors: Doors, door: str) -> None:
    bodies = {**{name: (body, ()) for name, body in table.RAW_BODIES.items()}, "empty": (b"", ())}
    bodies |= {name: (body, (header,)) for name, (header, body) in table.WRAPPINGS.items()}
    cases = {
        f"{name} at {path}": post(path, body, *headers)
        for path in JSON_ROUTES[kind_of(door)]
        for name, (body, headers) in bodies.items()
        if not (name == "empty" and path == "/abort_request")
    }
    assert wrong(doors.play(door, cases), is_refusal) == {}


@at(SERVERS)
def test_bodies_that_hold_too_much(doors: Doors, door: str) -> None:
    """Refused for that alone, before anything is made of them."""
    cases = {
        f"{name} at {path}": post(path, body, *headers)
        for path in (("/rooms",) if door == "bootstrap" else ("/generate", "/tokenize"))
        for name, (headers, body) in table.too_much().items()
    }
    assert wrong(doors.play(door, cases), lambda a: a.status == 413 and is_refusal(a)) == {}


@at((*ROUTERS, *WORKERS))
def test_wrong_values_and_lone_surrogates(doors: Doors, door: str) -> None:
    fields = {**table.FIELDS, **{f"surrogate-{name}": case for name, case in table.SURROGATES.items()}}
    cases = {name: post(path, body) for name, (path, body) in fields.items()}
    cases |= {"twice": post("/generate", table.TWICE), "traces": post("/traces", {"ids": [table.LONE]})}
    cases["abort"] = post("/abort_request", {"rid": table.LONE})
    if door in ROUTERS:
        for path in ("/workers", "/workers/role", "/load_lora_adapter"):
            for name in ("url", "role", "bootstrap_port", "lora_name", "model"):
                cases[f"{path} {name}"] = post(path, {"url": "http://127.0.0.1:9", name: table.LONE})
    assert wrong(doors.play(door, cases), is_refusal) == {}


def _not_named(
    doors: Doors, door: str, wrong: Sequence[tuple[str, Any, str]], named: Callable[[Answer, str], bool]
) -> Any:
    cases = {f"{path} {field} {i}": (post(path, body), field) for i, (path, body, field) in enumerate(wrong)}
    answers = doors.play(door, {name: call for name, (call, _) in cases.items()})
    return {name: a.body[:300] for name, a in answers.items() if not named(a, cases[name][1])}


def test_wrong_values_through_a_router_are_named(doors: Doors) -> None:
    assert _not_named(doors, "router", wrong_values(), mentions) == {}


def mentions(answer: Answer, field: str) -> bool:
    if answer.status != 400:
        return False
    error = json.loads(answer.body)["error"]
    return bool(error["message"]) and field in error["message"] and field in (error["param"] or "")


def test_wrong_fields_are_named(doors: Doors) -> None:
    seen = len(doors.alone.scheduler.seen)
    assert _not_named(doors, "unified", ALL_WRONG_FIELDS, names_field) == {}
    assert len(doors.alone.scheduler.seen) == seen


@at((*ROUTERS, "prefill", "decode"))
def test_wrong_fields_fail_nothing(doors: Doors, door: str) -> None:
    """The model differs there, and with it what is wrong."""
    assert _not_named(doors, door, ALL_WRONG_FIELDS, lambda answer, field: is_no_failure(answer)) == {}


@at((*ROUTERS, *WORKERS))
def test_bytes_in_text_that_are_no_utf_8(doors: Doors, door: str) -> None:
    """Refused where the text is read; a field that is not read may hold anything."""
    cases = {name: post(path, table.with_bytes(body)) for name, (path, body) in table.SURROGATES.items()}
    if door in ROUTERS:
        for path in ("/workers", "/workers/role", "/workers/migrate"):
            cases[path] = post(path, table.with_bytes({"url": "http://127.0.0.1:9", "role": table.LONE}))
    assert wrong(doors.play(door, cases), is_no_failure) == {}


@at(SERVERS)
def test_bytes_that_are_no_http(doors: Doors, door: str) -> None:
    def said(data: bytes) -> Answer:
        line = means.exchange(doors.urls[door], data, read_s=ANSWER_S).split(b"\r\n")[0]
        return Answer(int(line.split()[1]) if line else 0, line)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        answers = dict(zip(table.BYTES, pool.map(said, table.BYTES.values()), strict=True))
    assert wrong(answers, lambda a: a.status == 0 or 400 <= a.status < 500) == {}


def counted(doors: Doors) -> float:
    return float(doors.http.get(f"{doors.urls['prefill']}/check").json()["counters"].get("junk_frames", 0))


def test_tcp_junk_at_the_control_plane(doors: Doors) -> None:
    address = means.route(doors.cluster).control
    for junk in table.TCP_JUNK.values():
        with means.connect(address) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(junk)


def test_junk_frames_at_the_control_plane(doors: Doors) -> None:
    """Each frame is counted; one over the limit ends its connection, which is ZMQ's own doing."""
    for name, frames in table.FRAMES.items():
        before = counted(doors)
        with means.dealer(means.route(doors.cluster).control) as sock:
            sock.send_multipart(frames)
            wait_until(lambda before=before: counted(doors) > before, within_s=10, what=f"{name} counted as junk")
    with means.dealer(means.route(doors.cluster).control) as sock:
        sock.send(table.FRAME_OVER_THE_LIMIT)
