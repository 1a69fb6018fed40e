"""Bootstrap servers that refuse, are silent, or come back; and what a request is told whose pair was never joined."""

import contextlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap_server.app import BootstrapServer
from bootstrap_server.client import Registrar
from bootstrap_server.registry import BootstrapConfig
from disagg.registration import GAP_S, MAX_SERVERS, Outages, RouteFinder, registration_of
from tests.disagg.two_roles import Cluster
from transfer_backends.contract import LookupFailed
from transfer_backends.sides import KVPoll


@pytest.mark.parametrize(("is_own", "dp_size", "takes"), [(True, 1, False), (True, 2, True), (False, 1, True)])
def test_a_server_gets_rooms_unless_it_has_one_worker(is_own: bool, dp_size: int, takes: bool) -> None:
    manager: Any = SimpleNamespace(control_address="127.0.0.1:1", incarnation="a")
    kv_args: Any = SimpleNamespace(page_size=16, signature="s", dtype="bf16")
    registrar = Registrar("127.0.0.1:2", registration_of(manager, kv_args, dp_size=dp_size), is_own=is_own)
    assert registrar.on_room == ((registrar.add_room,) if takes else ())


@pytest.mark.parametrize("ends", ["answer", "gap"])
def test_an_answer_or_a_gap_ends_an_outage(ends: str) -> None:
    outages = Outages(1.0)
    assert [outages.refused("s", t) for t in (0.0, 1.0)] == [None, 1.0]
    if ends == "answer":
        outages.answered("s")
    later_s = 1.5 if ends == "answer" else 1.5 + GAP_S
    assert outages.refused("s", later_s) is None and outages.refused("s", later_s + 1.0) == 1.0


def test_servers_that_refused_are_bounded() -> None:
    """Requests name them: the one that was asked for longest ago goes."""
    outages = Outages(1.0)
    for i in range(MAX_SERVERS + 10):
        outages.refused(f"s{i}", 0.0)
        outages.refused("always", 0.0)
    assert len(outages) == MAX_SERVERS and outages.refused("always", 1.0) == 1.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def free_address() -> Iterator[str]:
    """Nothing listens there; nobody else gets the port meanwhile."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def failure(look_ups: RouteFinder, server: str) -> LookupFailed:
    with pytest.raises(LookupFailed) as caught:
        look_ups.find(server, 1, None)
    return caught.value


def test_a_refused_look_up_is_final_after_the_grace_and_names_the_server(free_address: str) -> None:
    clock = Clock()
    look_ups = RouteFinder(secret=None, grace_s=1.5, clock=clock)
    assert not failure(look_ups, free_address).permanent
    clock.now_s = 1.5
    final = failure(look_ups, free_address)
    assert final.permanent and f"bootstrap server {free_address} cannot be reached" in str(final)
    assert "refused" in str(final) and "; so for " in str(final)


def test_a_server_that_was_back_in_between_gets_its_grace_anew(free_address: str) -> None:
    """Whatever it said: it knows nobody yet."""
    clock = Clock()
    look_ups = RouteFinder(secret=None, grace_s=1.5, clock=clock)
    failure(look_ups, free_address)
    server = BootstrapServer(BootstrapConfig(port=int(free_address.rpartition(":")[2])), shared=True)
    server.start()
    with contextlib.closing(server):
        clock.now_s = 1.0
        unknown = failure(look_ups, free_address)
        assert "no prefill worker is registered" in str(unknown) and not unknown.permanent
    clock.now_s = 1.5
    assert not failure(look_ups, free_address).permanent


@pytest.mark.parametrize(("joined", "status"), [(False, 502), (True, 500)])
def test_a_failure_says_whether_the_pair_was_joined(*, joined: bool, status: int) -> None:
    cluster = Cluster(pages=(50, 50))
    cluster.submit("r", list(range(9)), 1, new=3)
    room = cluster.wire.room(1)
    if joined:
        room.to_decode.popleft()()
    cluster.decode.turn()
    assert room.decode is not None
    room.decode.state, room.decode.reason = KVPoll.Failed, "nobody is there"
    cluster.decode.turn()
    finish = cluster.decode.finish["r"]
    assert finish.status == status and "nobody is there" in finish.message
