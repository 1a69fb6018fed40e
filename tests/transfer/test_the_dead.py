"""A dead worker is not waited for: no connection, no message, and no other room waits behind it. Real sockets and pure cores."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace as with_values
from typing import Any

import pytest
from msgspec.structs import replace

from tests.transfer.cores import CAPS, CONFIG, KEY, MARK, decode_core
from tests.transfer.rig import Workers, join, succeed, until
from transfer_backends.contract import LookupFailed, Route, SourcePages, TargetPages, TransferConfig
from transfer_backends.decode.lookup import Connect
from transfer_backends.decode.proof import DEAD_S, MAX_DEAD, Prove
from transfer_backends.decode.rooms import MAX_LOOKUPS_A_SERVER, MAX_PENDING_ABORTS
from transfer_backends.liveness import GONE, UNMARKED, Liveness, ProcessMark, liveness, of_worker
from transfer_backends.sides import KVPoll
from transfer_backends.wire import Abort, Refused, Registered, TransferInfo

FOLLOWER = ProcessMark("host", 2, 1, 7)
PATIENT = TransferConfig(handshake_timeout_s=60.0, heartbeat_interval_s=0.1)  # a wait for it fails the test


@pytest.fixture
def workers() -> Iterator[Workers]:
    with contextlib.ExitStack() as ends:
        yield Workers(ends, PATIENT)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_a_room_whose_owner_is_gone_fails_long_before_the_handshake_times_out(workers: Workers) -> None:
    """The bootstrap server still lists a worker that was killed: its control port refuses, and that is proof."""
    route = Route(f"127.0.0.1:{closed_port()}", "dead", shared=True)
    decode = workers.decode(lambda server, room, _: route)
    first, second = (decode.receiver(room, bootstrap="b") for room in (1, 2))
    second.abort("user")
    second.close()
    assert decode.counters["rooms"] == 1
    until(lambda: first.poll() is KVPoll.Failed)
    assert "has ended" in first.failure()
    first.close()
    until(lambda: decode.counters["farewells"] == 0)
    assert decode.counters["rooms"] == decode.counters["peers"] == 0


def test_dead_and_mute_peers_slow_no_other(workers: Workers) -> None:
    """Look-ups that hang, a peer that accepts and never speaks, one that is gone: a good one is served meanwhile."""
    hang, prefill = threading.Event(), workers.prefill()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        routes = {
            "mute": Route(f"127.0.0.1:{mute.getsockname()[1]}", "mute"),
            "gone": Route(f"127.0.0.1:{closed_port()}", "gone"),
            "good": Route(prefill.control_address, prefill.incarnation),
        }

        def look_up(server: str, room: int, any_but: object) -> Route:
            if server == "hangs":
                hang.wait(30.0)
            return routes.get(server, routes["gone"])

        decode = workers.decode(look_up)
        workers.ends.callback(hang.set)
        waiting = [decode.receiver(room, bootstrap=("mute", "gone", "hangs")[room % 3]) for room in range(1, 31)]
        for room in range(100, 110):
            sender: Any = prefill.sender(room)
            receiver = decode.receiver(room, bootstrap="good")
            join(sender, receiver, [1])
            sender.send(SourcePages([1], metadata_row=0))
            succeed(sender, receiver)
        assert {receiver.poll() for receiver in waiting} == {KVPoll.Bootstrapping}
        for receiver in waiting:
            receiver.abort("enough")
            receiver.close()
        assert decode.counters["rooms"] == 0


def test_a_bootstrap_server_that_hangs_slows_no_other_room(workers: Workers) -> None:
    """It is known to serve several prefill workers, so each room looks it up; all threads would hang there."""
    hang, asked, prefill = threading.Event(), list[int](), workers.prefill()
    good = Route(prefill.control_address, prefill.incarnation)

    def look_up(server: str, room: int, any_but: object) -> Route:
        if server != "hangs":
            return good
        asked.append(room)
        if room > 1:
            hang.wait(30.0)
        return with_values(good, shared=True)

    decode = workers.decode(look_up)
    workers.ends.callback(hang.set)
    first = decode.receiver(1, bootstrap="hangs")
    until(lambda: first.poll() is KVPoll.WaitingForInput)
    waiting = [decode.receiver(room, bootstrap="hangs") for room in range(2, 102)]
    until(lambda: len(asked) == 1 + MAX_LOOKUPS_A_SERVER)
    other = decode.receiver(200, bootstrap="good")
    until(lambda: other.poll() is KVPoll.WaitingForInput)
    assert len(asked) == 1 + MAX_LOOKUPS_A_SERVER
    waiting.pop().abort("user")
    hang.set()
    until(lambda: all(receiver.poll() is KVPoll.WaitingForInput for receiver in waiting))
    for receiver in (first, other, *waiting):
        receiver.abort("enough")
        receiver.close()


def test_the_dead_are_not_connected_to_again() -> None:
    core = decode_core()
    core.open(1, 0, "b", 0.0)
    core.finder.on_route("b", 1, Route("p:1", "p", shared=True), 0.0)
    core.on_link_closed(1, 0.0)
    assert Prove("p", (UNMARKED,), "p:1") in core.effects.queue
    core.effects.queue.clear()
    core.proofs.on_proof("p", Liveness.UNKNOWN, 0.0)
    core.tick(0.1)
    core.finder.on_route("b", 1, Route("p:1", "p", shared=True), 0.1)
    assert any(isinstance(item, Connect) for item in core.effects.queue)  # nothing is proven
    core.on_link_closed(2, 0.2)
    core.proofs.on_proof("p", Liveness.DEAD, 0.2)
    core.effects.queue.clear()
    core.finder.on_route("b", 1, Route("p:1", "p", shared=True), 0.3)
    assert core.rooms[1, 0].state is KVPoll.Failed and not core.effects.queue
    core.rooms.close(core.rooms[1, 0])
    core.open(2, 0, "b", 0.3)
    core.finder.on_route(
        "b", 2, Route("p:1", "p", shared=True), 0.2 + DEAD_S
    )  # a false alarm: it is listed all that time
    assert any(isinstance(item, Connect) for item in core.effects.queue)
    for number in range(2 * MAX_DEAD):
        core.proofs.on_proof(f"x{number}", Liveness.DEAD, 100.0)
    assert len(core.proofs.ended) == MAX_DEAD and "p" not in core.proofs.ended
    core.proofs.on_proof("late", Liveness.DEAD, 100.0 + DEAD_S)
    assert list(core.proofs.ended) == ["late"]


def test_a_peer_that_answers_is_not_dead_despite_a_late_proof() -> None:
    core, route = decode_core(), Route("p:1", "p", shared=True)
    core.open(1, 0, "b", 0.0)
    core.finder.on_route("b", 1, route, 0.0)
    core.on_link_closed(1, 0.0)  # starts a proof
    core.finder.on_route("b", 1, route, 0.1)
    core.proofs.on_proof("p", Liveness.DEAD, 0.2)  # while it connects anew
    core.on_message(2, Registered("p", "d", (UNMARKED,)), 0.3)
    core.proofs.on_proof("p", Liveness.DEAD, 0.4)
    core.open(2, 0, "b", 0.5)
    core.finder.on_route("b", 2, route, 0.5)
    assert [core.rooms[room, 0].state for room in (1, 2)] == [KVPoll.WaitingForInput] * 2


def test_a_pending_abort_finds_its_worker_and_holds_nothing() -> None:
    core = decode_core()
    room = core.open(1, 0, "b", 0.0)
    core.rooms.abort(room, "user", 0.0)
    core.rooms.close(room)
    assert (len(core.rooms), core.rooms.num_pending_aborts) == (1, 1)
    core.check()
    core.effects.queue.clear()
    core.finder.on_route("b", 1, Route("p:1", "p", shared=True), 0.1)
    core.on_message(1, Registered("p", "d", (UNMARKED,)), 0.2)
    said = [item[1] for item in core.effects.queue if isinstance(item, tuple)]
    assert [type(message) for message in said[1:]] == [Abort] and core.rooms.num_pending_aborts == 0
    assert not any(isinstance(message, TransferInfo) for message in said)


def test_pending_aborts_are_bounded_and_expire() -> None:
    core = decode_core()
    for number in range(1, MAX_PENDING_ABORTS + 11):
        room = core.open(number, 0, "b", 0.0)
        core.rooms.abort(room, "user", 0.0)
        core.rooms.close(room)
    assert core.rooms.num_pending_aborts == len(core.rooms) == MAX_PENDING_ABORTS
    core.check()
    core.finder.on_lookup_failed("b", 1, LookupFailed("no worker is registered"), CONFIG.handshake_timeout_s)
    core.tick(CONFIG.handshake_timeout_s)
    assert core.rooms.num_pending_aborts == len(core.rooms) == 0


def test_decode_knows_all_processes_that_may_write(workers: Workers) -> None:
    prefill = workers.prefill(FOLLOWER)
    decode = workers.decode(lambda *_: Route(prefill.control_address, prefill.incarnation))
    receiver = decode.receiver(1, bootstrap="b")
    until(lambda: receiver.poll() is KVPoll.WaitingForInput)
    (peer,) = decode.core.peers
    assert (peer.marks[0].pid, peer.marks[1:]) == (os.getpid(), (FOLLOWER,))
    receiver.abort("enough")
    receiver.close()


@pytest.mark.parametrize(
    ("ranks", "worker"),
    [
        ([Liveness.DEAD], Liveness.DEAD),
        ([Liveness.DEAD, Liveness.ALIVE], Liveness.UNKNOWN),  # nobody answers there, and bytes may come
        ([Liveness.DEAD, Liveness.UNKNOWN], Liveness.UNKNOWN),
        ([Liveness.UNKNOWN, Liveness.DEAD], Liveness.UNKNOWN),
        ([Liveness.ALIVE, Liveness.DEAD], Liveness.ALIVE),
        ([Liveness.DEAD, Liveness.DEAD], Liveness.DEAD),
    ],
)
def test_a_worker_is_dead_when_all_its_processes_are(ranks: list[Liveness], worker: Liveness) -> None:
    assert of_worker(ranks) is worker


@pytest.mark.parametrize(
    ("address", "is_apart", "settled_s"),
    [("", False, 0.5), ("p", False, 0.5), ("10.0.0.2", False, CAPS.resend_s), ("p", True, CAPS.resend_s)],
)
def test_the_leaders_path_says_nothing_of_other_machines(address: str, is_apart: bool, settled_s: float) -> None:
    """Whatever a rank of another machine had sent may have waited for its network for long."""
    core = decode_core(is_apart=is_apart)
    room = core.open(*KEY, "b", 0.0)
    core.finder.on_route("b", KEY[0], Route("p:1", "p"), 0.0)
    core.on_message(1, Registered("p", "d", (MARK, replace(FOLLOWER, address=address))), 0.0)
    core.rooms.provide(room, TargetPages([1, 2], 1), 0.0)
    core.on_link_closed(1, 0.0)
    core.proofs.on_proof("p", Liveness.DEAD, 0.0)
    for step in range(round(settled_s * 10)):
        core.tick(0.1 * step)
        assert not room.drained
    for step in range(20):
        core.tick(settled_s + 0.1 * step)
    assert room.drained


def test_the_port_of_a_rank_is_at_its_own_address() -> None:
    with socket.create_server(("127.0.0.2", 0)) as alive:
        mark = ProcessMark("another machine", 2, 1, alive.getsockname()[1], "127.0.0.2")
        assert liveness(mark, "127.0.0.1:1") is Liveness.ALIVE
        assert liveness(replace(mark, address=""), "127.0.0.1:1") is Liveness.DEAD
    assert liveness(mark, "127.0.0.1:1") is Liveness.DEAD


def test_a_successor_proves_the_death_of_one_process_alone() -> None:
    """It has the leader's address; a follower may still write. One that was alone is dead."""
    for followers in ((), (FOLLOWER,)):
        core = decode_core()
        room = core.open(*KEY, "b", 0.0)
        core.finder.on_route("b", KEY[0], Route("p:1", "p"), 0.0)
        core.on_message(1, Registered("p", "d", (MARK, *followers)), 0.0)
        core.rooms.provide(room, TargetPages([1, 2], 1), 0.0)
        core.on_link_closed(1, 1.0)
        core.proofs.on_proof("p", Liveness.ALIVE, 1.0)  # its port answers, and it connects again
        core.effects.queue.clear()
        core.on_message(2, Refused("successor", "d", "the prefill worker was restarted", True), 1.1)
        peer = core.peers.get("p")
        assert peer is not None and (peer.settled_at_s is None) == bool(followers)
        core.tick(1.2)
        core.tick(1.4)
        if followers:
            asked = [item.marks for item in core.effects.queue if isinstance(item, Prove)]
            assert asked == [(GONE, FOLLOWER)] and room.exposed
            assert liveness(GONE, "p:1") is Liveness.DEAD
            core.proofs.on_proof("p", Liveness.DEAD, 1.4)
        for step in range(20):
            core.tick(1.4 + 0.1 * step)
        assert room.drained
