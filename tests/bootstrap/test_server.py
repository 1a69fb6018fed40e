"""The server over real HTTP: what clients get, what junk gets, leases, rooms, restarts."""

import contextlib
import http.client
import json
import socket
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bootstrap_server.client import LONGEST_PAUSE_S, MAX_WAITING_ROOMS, REMEMBER_S, BootstrapError, Registrar, look_up
from service.security.keys import AUTH_HEADER, CHALLENGE_HEADER, Call, Signer
from tests.bootstrap.test_registry import worker
from tests.transfer.rig import until

SECRET = b"open sesame"


def fetch(port: int, method: str, path: str, body: Any = None, headers: Any = None) -> http.client.HTTPResponse:
    """The answer, read as a whole: `text` is its body."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        response.text = response.read().decode()  # type: ignore[attr-defined]
        return response


def call(port: int, method: str, path: str, body: Any = None, headers: Any = None) -> tuple[int, Any]:
    response: Any = fetch(port, method, path, body, headers)
    return response.status, json.loads(response.text)


def test_embedded(serve: Any, register: Any) -> None:
    server = serve(shared=False)
    address = f"127.0.0.1:{server.port}"
    with pytest.raises(BootstrapError, match="no prefill worker is registered") as caught:
        look_up(address, 1)
    assert not caught.value.permanent
    registrar = register(server.port, "a")
    assert registrar.registered.wait(60)
    reply = look_up(address, 1)
    assert (reply.worker.control, reply.worker.incarnation, reply.shared) == ("10.0.0.1:1000", "a", False)
    registrar.close()
    with pytest.raises(BootstrapError, match="no prefill worker"):
        look_up(address, 1)


def test_shared_rooms(serve: Any, register: Any) -> None:
    server = serve()
    address = f"127.0.0.1:{server.port}"
    one, two = register(server.port, "a", port=1), register(server.port, "b", port=2)
    one.add_room(11)  # before it knows whether the server wants rooms
    for registrar in (one, two):
        assert registrar.registered.wait(60)
    two.add_room(22)
    until(lambda: server.registry.num_rooms == 2)
    assert [look_up(address, room).worker.incarnation for room in (11, 22)] == ["a", "b"]
    others = [look_up(address, 11, any_but=but).worker.incarnation for but in ((), ("a", "z"))]
    assert others == ["a", "b"]
    with pytest.raises(BootstrapError, match="no other prefill worker"):
        look_up(address, 11, any_but=("a", "b"))
    with pytest.raises(BootstrapError, match="but: at most 64"):
        look_up(address, 11, any_but=["x"] * 65)


def test_server_that_starts_late(serve: Any, register: Any) -> None:
    port = port_of_nobody()
    registrar = register(port, "a")
    until(lambda: registrar.error is not None)
    assert "cannot be reached" in registrar.error
    serve(port=port)
    assert registrar.registered.wait(60)


def test_a_restarted_server_gets_the_latest_rooms_once_more(serve: Any, register: Any) -> None:
    """Without a new room: requests that decode still looks for were registered at the one that died."""
    first = serve(lease_s=0.3)
    registrar = register(first.port, "a")
    for room in range(1, 4):
        registrar.add_room(room)
    until(lambda: first.registry.num_rooms == 3)
    first.close()
    second = serve(port=first.port, lease_s=0.3)
    until(lambda: second.registry.num_rooms == 3)
    assert look_up(f"127.0.0.1:{second.port}", 2).worker.incarnation == "a"


@pytest.mark.parametrize(("is_own", "pause_s"), [(False, LONGEST_PAUSE_S), (True, 10.0)])
def test_a_worker_renews_at_its_own_server_no_oftener_than_its_lease_requires(
    serve: Any, is_own: bool, pause_s: float
) -> None:
    server = serve(lease_s=30.0)
    registrar = Registrar(f"127.0.0.1:{server.port}", worker("a"), clock=lambda: 5.0, is_own=is_own)
    assert registrar.turn() == pytest.approx(pause_s)


def test_rooms_that_may_be_sent_again_are_bounded_and_expire(serve: Any) -> None:
    now_s, server = 0.0, serve()
    address = f"127.0.0.1:{server.port}"
    registrar = Registrar(address, worker("a"), clock=lambda: now_s)

    def send_until(num_rooms: int) -> None:
        until(lambda: registrar.turn() >= 0 and server.registry.num_rooms == num_rooms)

    def restart() -> None:
        nonlocal now_s, server
        server.close()
        server = serve(port=server.port)
        now_s += 20.0  # the lease is over

    registrar.turn()
    for room in range(1, MAX_WAITING_ROOMS + 10):
        registrar.add_room(room)
        if room % 10_000 == 0:
            registrar.turn()
    send_until(MAX_WAITING_ROOMS + 9)
    restart()
    send_until(MAX_WAITING_ROOMS)
    with pytest.raises(BootstrapError):
        look_up(address, 1)
    assert look_up(address, MAX_WAITING_ROOMS + 9).worker.incarnation == "a"
    now_s += REMEMBER_S
    registrar.add_room(7)
    registrar.turn()
    restart()
    send_until(1)


def num_registrations(port: int) -> float:
    """How many registrations and renewals the server has accepted."""
    metrics: Any = fetch(port, "GET", "/metrics")
    samples = (sample for family in text_string_to_metric_families(metrics.text) for sample in family.samples)
    labels = {"call": "PUT /route", "status": "200"}
    return sum(s.value for s in samples if s.name == "tandem_bootstrap_calls_total" and s.labels == labels)


def test_calls_are_counted_from_0(serve: Any) -> None:
    text = fetch(serve(shared=False).port, "GET", "/metrics").text
    for call_ in ("PUT /route", "GET /route", "DELETE /route", "POST /rooms"):
        for status in (200, 404, 500):
            assert f'tandem_bootstrap_calls_total{{call="{call_}",status="{status}"}} 0.0' in text
    assert "/health" not in text


def test_leases_are_renewed_and_end(serve: Any, register: Any) -> None:
    server = serve(shared=False, lease_s=2.0)
    registrar = register(server.port, "a")
    assert registrar.registered.wait(60)
    until(lambda: num_registrations(server.port) >= 4)  # the first, and three renewals
    assert call(server.port, "GET", "/health")[1]["workers"] == 1
    registrar.close()
    assert call(server.port, "PUT", "/route", GOOD)[0] == 200  # a worker that dies without leaving
    assert call(server.port, "GET", "/health")[1]["workers"] == 1
    until(lambda: call(server.port, "GET", "/health")[1]["workers"] == 0)


def test_secret(serve: Any, register: Any) -> None:
    server = serve(shared=False, secret=SECRET)
    address = f"127.0.0.1:{server.port}"
    assert register(server.port, "a", secret=SECRET).registered.wait(60)
    assert look_up(address, 1, secret=SECRET).worker.incarnation == "a"
    assert call(server.port, "GET", "/health") == (200, {"workers": 1, "rooms": 0, "refused": 0})
    for wrong in (None, b"guess"):
        with pytest.raises(BootstrapError, match="--cluster-secret-file") as caught:
            look_up(address, 1, secret=wrong)
        assert caught.value.permanent
    assert call(server.port, "PUT", "/route", {}, {AUTH_HEADER: "::no"})[0] == 401
    assert call(server.port, "GET", "/health")[1]["refused"] >= 3


def test_a_server_without_the_secret_is_not_believed(serve: Any, register: Any) -> None:
    server = serve(shared=False)
    assert register(server.port, "false").registered.wait(60)
    with pytest.raises(BootstrapError, match="did not show that it knows the secret") as caught:
        look_up(f"127.0.0.1:{server.port}", 1, secret=SECRET)
    assert caught.value.permanent


def test_a_recorded_call_is_worth_nothing(serve: Any, register: Any) -> None:
    """Not again, not with another body, path or method, and not after the server was restarted."""
    server = serve(shared=False, secret=SECRET)
    signer = Signer(SECRET)
    signer.challenge = fetch(server.port, "GET", "/route?room=1").headers[CHALLENGE_HEADER]
    body = json.dumps(GOOD).encode()
    header = {AUTH_HEADER: signer.sign(Call("PUT", "/route", body))[0]}
    for method, path, other in (
        ("PUT", "/route", json.dumps({**GOOD, "control_host": "evil"}).encode()),
        ("POST", "/route", body),
        ("PUT", "/rooms", body),
    ):
        assert call(server.port, method, path, other, header)[0] == 401
    assert call(server.port, "PUT", "/route", body, header)[0] == 200
    assert call(server.port, "PUT", "/route", body, header)[0] == 401
    fresh = {AUTH_HEADER: signer.sign(Call("PUT", "/route", body))[0]}
    server.close()
    again = serve(shared=False, secret=SECRET, port=server.port)
    assert call(again.port, "PUT", "/route", body, fresh)[0] == 401
    assert call(again.port, "GET", "/health")[1]["workers"] == 0


GOOD: dict[str, Any] = msgspec.to_builtins(worker("a"))
BAD_CALLS: list[tuple[str, str, Any, int, str]] = [
    ("PUT", "/route", b"", 400, "body"),
    ("PUT", "/route", b"junk", 400, "not valid JSON"),
    ("PUT", "/route", b"\xff\xfe", 400, "body"),
    ("PUT", "/route", [], 400, "Expected `object`"),
    ("PUT", "/route", {}, 400, "incarnation"),
    *(
        ("PUT", "/route", {**GOOD, field: value}, 400, field)
        for field, values in {
            "incarnation": ("", "x" * 300),
            "control_port": (0, "1", 70000),
            "page_size": (0,),
            "role": ("decode",),
            "dp_rank": (-1, 1),
            "dp_size": (0, 65),
            "surprise": (1,),
        }.items()
        for value in values
    ),
    ("PUT", "/route", b"[" * 200000, 400, "body"),
    ("PUT", "/route", b"x" * (2 << 20), 413, "longer"),
    *(
        ("GET", f"/route{room}", None, 400, "room")
        for room in ("", "?room=0", "?room=-1", "?room=x", f"?room={2**63}", "?room=%EF%BC%91")
    ),
    ("GET", "/route?room=1", None, 404, "no prefill worker"),
    ("DELETE", "/route", None, 400, "incarnation"),
    ("DELETE", "/route?incarnation=nobody", None, 404, "nobody"),
    ("POST", "/rooms", {"incarnation": "nobody", "rooms": [1]}, 404, "nobody"),
    ("POST", "/rooms", {"incarnation": "a", "rooms": [0]}, 400, "rooms"),
    ("POST", "/rooms", {"incarnation": "a", "rooms": list(range(1, 5000))}, 400, "rooms"),
    ("POST", "/route", {}, 405, "POST"),
    ("GET", "/nothing", None, 404, "/nothing"),
]


def test_bad_calls(serve: Any, register: Any) -> None:
    server = serve()
    for method, path, body, status, text in BAD_CALLS:
        got, reply = call(server.port, method, path, body)
        assert (got, set(reply)) == (status, {"error"}), (method, path, reply)
        assert text in reply["error"]["message"], (method, path, reply)
    assert register(server.port, "a").registered.wait(60)


def port_of_nobody() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_look_up_at_something_else() -> None:
    with pytest.raises(BootstrapError, match="not HOST:PORT") as caught:
        look_up("nonsense", 1)
    assert caught.value.permanent
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(BootstrapError, match="cannot be reached") as caught,
    ):
        look_up(f"127.0.0.1:{silent.getsockname()[1]}", 1, timeout_s=0.2)
    assert not caught.value.permanent and not caught.value.refused
    with pytest.raises(BootstrapError, match="cannot be reached") as caught:
        look_up(f"127.0.0.1:{port_of_nobody()}", 1)
    assert caught.value.refused and not caught.value.permanent
