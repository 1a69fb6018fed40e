"""What requests and peers can make a decode worker remember has an end."""

import pytest

from tests.transfer.sim import ARGS, CAPS
from transfer_backends.contract import Route, TransferConfig
from transfer_backends.decode_rooms import DecodeRooms
from transfer_backends.kvpoll import KVPoll


def core(**config: int) -> DecodeRooms:
    settings = TransferConfig(**config)  # type: ignore[arg-type]
    return DecodeRooms(incarnation="d", kv_args=ARGS, caps=CAPS, descriptor=b"", config=settings)


def test_one_prefill_worker_more_than_fit_is_refused_and_those_that_are_known_go_on() -> None:
    rooms = core(max_peers=2)
    for room in range(1, 4):
        rooms.open(room, 0, f"server-{room}:1", 0.0)
        rooms.on_route(f"server-{room}:1", room, Route(f"h{room}:1", f"p{room}"), 0.0)
    assert rooms.machine.state((3, 0)) is KVPoll.Failed and "no more fit (max_peers)" in (rooms.failure((3, 0)) or "")
    assert [rooms.machine.state((room, 0)) for room in (1, 2)] == [KVPoll.Bootstrapping] * 2
    rooms.open(4, 0, "server-2:1", 0.0)
    assert rooms.machine.state((4, 0)) is KVPoll.Bootstrapping and len(rooms.sessions) == 2
    assert rooms.drained((3, 0))
    rooms.close((3, 0))


@pytest.mark.parametrize("shared", [False, True])
def test_the_latest_bootstrap_servers_are_remembered(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    monkeypatch.setattr("transfer_backends.decode_rooms.MAX_SERVERS", 3)
    rooms = core()
    for room in range(1, 9):
        rooms.open(room, 0, f"server-{room}:1", 0.0)
        rooms.on_route(f"server-{room}:1", room, Route("h:1", "p", shared), 0.0)
    table = rooms._shared if shared else rooms._routes
    assert list(table) == [f"server-{room}:1" for room in (6, 7, 8)]
