"""The control plane over real sockets, with the fake engine: refusals, timeouts, hostile frames, lost messages."""

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq

from service.security.curve import guard_connector
from tests.transfer.rig import Pair, succeed, until
from transfer_backends.contract import RecomputeRequest, Route, SourcePages, TargetPages, Work
from transfer_backends.control_thread import TICK_S
from transfer_backends.liveness import Liveness, liveness, own_mark
from transfer_backends.prefill.manager import IDLE_S
from transfer_backends.sides import IllegalTransition, KVPoll, RoomInUse
from transfer_backends.wire import Ping, encode

SHORT: dict[str, Any] = {"heartbeat_interval_s": 0.1, "handshake_timeout_s": 0.4}


@pytest.fixture
def short_pairs(pairs: Any) -> Any:
    return lambda *args, **config: pairs(*args, **{**SHORT, **config})


def test_rooms(short_pairs: Any) -> None:
    pair = short_pairs()
    sender = pair.prefill.sender(5)
    receiver = pair.decode.receiver(5, bootstrap="b")
    for make in (lambda: pair.prefill.sender(5), lambda: pair.decode.receiver(5, bootstrap="b")):
        with pytest.raises(RoomInUse):
            make()
    for make in (lambda: pair.prefill.sender(0), lambda: pair.decode.receiver(0, bootstrap="b")):
        with pytest.raises(ValueError, match="bootstrap_room"):
            make()
    with pytest.raises(RuntimeError, match="before its pages were released"):
        sender.close()
    with pytest.raises(IllegalTransition):
        sender.send(SourcePages([1]))  # decode has not given its pages
    until(lambda: receiver.poll() is KVPoll.WaitingForInput)
    with pytest.raises(ValueError, match="outside the pool of 64"):
        receiver.provide(TargetPages([64], 0))
    with pytest.raises(ValueError, match="metadata_row 64"):
        receiver.provide(TargetPages([1], 64))
    receiver.provide(TargetPages([1, 2], 0))
    with pytest.raises(IllegalTransition):
        receiver.provide(TargetPages([1, 2], 0))
    until(lambda: sender.poll() is KVPoll.WaitingForInput)
    with pytest.raises(ValueError, match="leaves a gap"):
        sender.send(SourcePages([1], start=1))
    with pytest.raises(ValueError, match="outside the pool"):
        sender.send(SourcePages([-1]))
    with pytest.raises(ValueError, match="metadata_row 64"):
        sender.send(SourcePages([1, 2], metadata_row=64))
    sender.send(SourcePages([1, 2], metadata_row=1))
    succeed(sender, receiver)
    pair.works(5)  # a room may be used again once it is closed


def test_fake_pair_needs_no_peer(short_pairs: Any) -> None:
    pair = short_pairs()
    sender, receiver = pair.prefill.sender(1, fake=True), pair.decode.receiver(1, bootstrap="2.2.2.2:1", fake=True)
    assert sender.poll() is receiver.poll() is KVPoll.WaitingForInput
    receiver.provide(TargetPages([1], 0))
    sender.send(SourcePages([1]))
    assert sender.poll() is KVPoll.Transferring and not sender.released()
    sender.send(SourcePages([2], start=1, metadata_row=0))
    assert sender.poll() is receiver.poll() is KVPoll.Success
    assert sender.released() and receiver.drained()


def test_wakeup_on_every_change(short_pairs: Any) -> None:
    """A role that sleeps until it is woken sees every state."""
    pair = short_pairs()
    woken = threading.Event()
    pair.decode.set_wakeup(woken.set)
    receiver = pair.decode.receiver(1, bootstrap="b")

    def sleep_until(state: KVPoll) -> None:
        while receiver.poll() < state:
            assert woken.wait(5.0), f"not woken before {state.name}"
            woken.clear()

    sleep_until(KVPoll.WaitingForInput)
    sender = pair.prefill.sender(1)
    receiver.provide(TargetPages([1], 0))
    until(lambda: sender.poll() is KVPoll.WaitingForInput)
    sender.send(SourcePages([]))
    sleep_until(KVPoll.Transferring)
    sender.send(SourcePages([1], metadata_row=0))
    sleep_until(KVPoll.Success)
    succeed(sender, receiver)


def test_bootstrap_timeout_and_late_indices(short_pairs: Any) -> None:
    pair = short_pairs(bootstrap_timeout_s=0.2)
    sender = pair.prefill.sender(1)
    until(lambda: sender.poll() is KVPoll.Failed)
    assert "bootstrap timeout" in sender.failure()
    sender.close()
    pair.decode.receiver(2, bootstrap="b").abort("unused")
    late = pair.decode.receiver(1, bootstrap="b")  # prefill gave up long ago, and decode learns that at once
    until(lambda: late.poll() is KVPoll.WaitingForInput)
    late.provide(TargetPages([1], 0))
    until(lambda: late.poll() is KVPoll.Failed and late.drained())
    late.close()


def test_indices_before_the_request_and_orphans(short_pairs: Any) -> None:
    pair = short_pairs(bootstrap_timeout_s=0.5)
    early, orphan = (pair.decode.receiver(room, bootstrap="b") for room in (1, 2))
    for receiver in (early, orphan):
        until(lambda r=receiver: r.poll() is KVPoll.WaitingForInput)
        receiver.provide(TargetPages([1], 0))
    until(lambda: len(pair.prefill.core.inbox) == 2)
    sender = pair.prefill.sender(1)
    assert sender.poll() is KVPoll.WaitingForInput and sender.num_pages == 1
    sender.send(SourcePages([1], metadata_row=0))
    until(lambda: early.poll() is KVPoll.Success)
    until(lambda: orphan.poll() is KVPoll.Failed)
    assert "no request for it came to prefill" in orphan.failure()
    until(orphan.drained)
    assert pair.prefill.counters["orphans_expired"] == 1
    late = pair.prefill.sender(2)
    assert late.poll() is KVPoll.Failed
    for transfer in (sender, early, orphan, late):
        transfer.close()


def test_handshake_timeout_names_the_reason(short_pairs: Any) -> None:
    pair = short_pairs()
    pair.route = None
    receiver = pair.decode.receiver(1, bootstrap="b")
    until(lambda: receiver.poll() is KVPoll.Failed)
    assert receiver.failure() == "handshake timed out after 0.4 s: no worker is registered"
    receiver.close()
    with socket.create_server(("127.0.0.1", 0)) as dumb:  # accepts, never answers
        pair.route = Route(f"127.0.0.1:{dumb.getsockname()[1]}", "who")
        receiver = pair.decode.receiver(2, bootstrap="b")
        until(lambda: receiver.poll() is KVPoll.Failed)
        assert "has not answered" in receiver.failure()
        receiver.close()
    pair.route = Route(pair.prefill.control_address, pair.prefill.incarnation)
    pair.works(3)


def test_stale_route_is_looked_up_again(short_pairs: Any) -> None:
    pair = short_pairs()
    good, pair.route = pair.route, Route(pair.prefill.control_address, "an earlier incarnation")
    receiver = pair.decode.receiver(1, bootstrap="b")
    until(lambda: pair.prefill.counters.get("refused", 0) >= 1)
    pair.route = good
    until(lambda: receiver.poll() is KVPoll.WaitingForInput)
    receiver.abort("enough")
    receiver.close()


@pytest.mark.parametrize("secrets", [(b"s", b"t"), (b"s", None), (None, b"s")])
def test_another_secret_or_none_is_refused_and_counted(short_pairs: Any, secrets: Any) -> None:
    pair = short_pairs(handshake_timeout_s=2.0, sides=[{"secret": secret} for secret in secrets])
    receiver = pair.decode.receiver(1, bootstrap="b")
    until(lambda: receiver.poll() is KVPoll.Failed)
    assert "--cluster-secret-file" in receiver.failure()
    until(lambda: pair.prefill.counters.get("refused_connections", 0) >= 1)
    assert pair.prefill.counters["peers"] == 0
    receiver.close()


def test_a_decode_key_that_is_not_the_cluster_s_is_refused(short_pairs: Any) -> None:
    """A process that knows prefill's public key, and no more, is refused before it can speak."""
    pair = short_pairs(secret=b"s")
    pair.works(1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        guard_connector(stranger, b"s")
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(f"tcp://{pair.prefill.control_address}")
        stranger.send(encode(Ping("evil", pair.prefill.incarnation, 1)))
        until(lambda: pair.prefill.counters.get("refused_connections", 0) >= 1)
    assert pair.prefill.counters.get("refused", 0) == 0  # none of its frames was read
    pair.works(2)


class Tap:
    """A wire between decode and prefill that records what decode sends, and can replay it."""

    def __init__(self, there: str) -> None:
        host, _, port = there.rpartition(":")
        self._there = (host, int(port))
        self.recorded: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._socks: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._there)
                self._socks += [near, far]
                threading.Thread(target=self._pump, args=(near, far, self.recorded), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, []), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, kept: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                kept.append(data)
                target.sendall(data)

    def inject(self, data: bytes) -> None:
        """Send it on the open connection, as if decode did."""
        self._socks[-1].sendall(data)

    def close(self) -> None:
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def test_what_was_recorded_cannot_be_said_again(short_pairs: Any) -> None:
    """Neither on the same connection, nor on a new one, nor is anything of it readable."""
    pair = short_pairs(secret=b"s", heartbeat_interval_s=60.0)
    tap = Tap(pair.prefill.control_address)
    pair.route = Route(tap.address, pair.prefill.incarnation)
    sender, receiver = pair.meet(1)
    recorded = list(tap.recorded)
    assert recorded and not any(pair.prefill.incarnation.encode() in data for data in recorded)
    tap.inject(recorded[-1])  # the transfer info of room 1, once more: its frame counter is used up
    until(lambda: pair.prefill.counters.get("refused_connections", 0) == 1)
    assert pair.prefill.counters.get("protocol_errors", 0) == 0  # it was not read
    with socket.create_connection(tap._there) as again:
        again.settimeout(5)
        with contextlib.suppress(OSError):
            again.sendall(b"".join(recorded))
            while again.recv(65536):
                pass
    until(lambda: pair.prefill.counters["refused_connections"] >= 2)
    assert pair.prefill.counters["peers"] == 1 and pair.prefill.counters.get("refused", 0) == 0
    sender.send(SourcePages([4, 5, 6], metadata_row=0))  # and the worker that was copied is not disturbed
    succeed(sender, receiver)
    tap.close()


def test_decode_asks_prefill_to_compute(short_pairs: Any) -> None:
    """No sender waits; the role is woken, opens the room and finds its pages there."""
    pair = short_pairs()
    woken = threading.Event()
    pair.prefill.set_wakeup(woken.set)
    work = Work(tokens=[5, 6, 7], priority=-3, share=False, namespace=("salt", "key"), variant="adapter")
    receiver = ask(pair, 9, [1, 2], work, skip_pages=2)
    assert woken.wait(5.0)
    assert (
        pair.prefill.take_recompute_requests() == [RecomputeRequest(9, 1, work)]
        and pair.prefill.take_recompute_requests() == []
    )
    sender = pair.prefill.sender(9, room_attempt=1)
    assert sender.poll() is KVPoll.WaitingForInput and (sender.num_pages, sender.skip_pages) == (2, 2)
    sender.send(SourcePages([2, 3, 4, 5], metadata_row=0))  # the first two are left out
    succeed(sender, receiver)
    again = ask(pair, 9, [3], work)  # decode forgot the room, prefill has not
    until(lambda: again.poll() is KVPoll.Failed and again.drained())
    assert "attempt 1 exists already" in again.failure() and pair.prefill.take_recompute_requests() == []
    again.close()


def ask(pair: Pair, room: int, pages: list[int], work: Work, *, skip_pages: int = 0) -> Any:
    receiver = pair.decode.receiver(room, bootstrap="b", room_attempt=1)
    until(lambda: receiver.poll() is KVPoll.WaitingForInput)
    receiver.provide(TargetPages(pages, 0, skip_pages=skip_pages, work=work))
    return receiver


@pytest.mark.parametrize("num_cached", [3, 5, 6])
def test_what_is_cached_may_fill_fewer_pages_than_were_given(short_pairs: Any, num_cached: int) -> None:
    """Two of its pages the receiver has already."""
    pair = short_pairs()
    receiver = ask(pair, 9, [1, 2, 3, 4], Work(tokens=[5, 6, 7], cached=True), skip_pages=2)
    (asked,) = until(pair.prefill.take_recompute_requests)
    assert asked.work.cached
    sender = pair.prefill.sender(9, room_attempt=1)
    sender.send(SourcePages(list(range(1, 1 + num_cached)), metadata_row=0))
    succeed(sender, receiver)
    assert receiver.written_pages() == num_cached - 2


@pytest.mark.parametrize(("cached", "num_sent"), [(True, 3), (False, 1), (False, 3)])
def test_other_numbers_of_pages_than_were_given_fail(short_pairs: Any, cached: bool, num_sent: int) -> None:
    """More of what is cached, and any other number of what is computed."""
    pair = short_pairs()
    receiver = ask(pair, 9, [1, 2], Work(tokens=[5, 6, 7], cached=cached))
    until(pair.prefill.take_recompute_requests)
    sender = pair.prefill.sender(9, room_attempt=1)
    sender.send(SourcePages(list(range(1, 1 + num_sent)), metadata_row=0))
    pair.fail(sender, receiver)
    assert "the two prompts differ" in receiver.failure()


@pytest.mark.parametrize("num_claimed", [1, 3])
def test_a_sender_that_claims_other_pages_than_were_given_is_not_believed(short_pairs: Any, num_claimed: int) -> None:
    """Fewer is a fault of what is computed, more of all."""
    pair = short_pairs()
    rooms = pair.decode.core.rooms
    for room, cached in ((8, False), (9, True)):
        receiver = ask(pair, room, [1, 2], Work(tokens=[5, 6, 7], cached=cached))
        misfit = rooms.misfit(rooms[room, 1], num_pages=num_claimed, row=b"")
        assert (misfit is None) == (cached and num_claimed < 2)
        receiver.abort("over")
        until(receiver.drained)
        receiver.close()


def test_a_room_whose_worker_is_named_asks_no_server(short_pairs: Any) -> None:
    pair = short_pairs()
    route, pair.route = pair.route, None
    receiver = pair.decode.receiver(9, bootstrap="", room_attempt=1, route=route)
    until(lambda: receiver.poll() is KVPoll.WaitingForInput)
    receiver.abort("over")
    receiver.close()


def test_what_decode_aborts_before_prefill_takes_it_fails_when_it_does(short_pairs: Any) -> None:
    pair = short_pairs()
    receiver = ask(pair, 9, [1, 2], Work(tokens=[5]))
    until(lambda: pair.prefill.core.inbox.num_recompute_requests)
    receiver.abort("the client left")
    until(receiver.drained)
    receiver.close()
    (asked,) = pair.prefill.take_recompute_requests()
    sender = pair.prefill.sender(asked.room, room_attempt=asked.room_attempt)
    assert sender.poll() is KVPoll.Failed and sender.released() and "the client left" in sender.failure()
    sender.close()


def test_a_recompute_fails_at_once_if_no_worker_is_found(short_pairs: Any) -> None:
    """Other rooms look up again until their handshake times out (here: never in this test)."""
    pair = short_pairs(handshake_timeout_s=60.0)
    pair.route = None
    receiver = pair.decode.receiver(9, bootstrap="b", room_attempt=1)
    until(lambda: receiver.poll() is KVPoll.Failed)
    assert "no worker is registered" in receiver.failure() and receiver.drained()
    receiver.close()


def test_more_than_prefill_keeps_is_refused(short_pairs: Any) -> None:
    pair = short_pairs(max_orphans=1)
    first, second = (ask(pair, room, [room], Work(tokens=[5])) for room in (1, 2))
    until(lambda: second.poll() is KVPoll.Failed and second.drained())
    assert "too much to compute" in second.failure() and first.poll() is KVPoll.WaitingForInput
    assert [asked.room for asked in pair.prefill.take_recompute_requests()] == [1]
    second.close()
    first.abort("over")
    until(first.drained)
    first.close()


def test_an_idle_worker_wakes_once_a_tick_at_most(short_pairs: Any) -> None:
    """Counts wake-ups: what one costs depends on the machine."""
    pair = short_pairs()
    pair.works(1)
    turns: Counter[str] = Counter()
    for name, waker in (("prefill", pair.prefill.control), ("decode", pair.decode.control)):
        waker.turn = partial(_counted, waker.turn, turns, name)
    sender = pair.prefill.driver
    sender.step = partial(_counted, sender.step, turns, "sender")
    begin = time.monotonic()
    until(lambda: min(turns[name] for name in ("prefill", "decode")) > 20)
    ticks = (time.monotonic() - begin) / TICK_S
    for name in ("prefill", "decode"):
        assert turns[name] <= 2 * ticks + 5  # heartbeats come in between
    assert turns["sender"] <= ticks * TICK_S / IDLE_S + 2


def _counted(work: Callable[..., Any], turns: Counter[str], name: str, *args: Any) -> Any:
    turns[name] += 1
    return work(*args)


def test_liveness_of_processes() -> None:
    mark = own_mark()
    assert liveness(mark, "127.0.0.1:1") is Liveness.ALIVE
    assert liveness(msgspec.structs.replace(mark, start_ticks=1), "127.0.0.1:1") is Liveness.DEAD
    far = msgspec.structs.replace(mark, host="elsewhere")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert liveness(far, address) is Liveness.ALIVE
    assert liveness(far, address) is Liveness.DEAD
    assert liveness(far, "not an address") is Liveness.UNKNOWN
