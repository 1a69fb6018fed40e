"""Frames at both managers as they run: threads, ZMQ over TCP, CURVE or none. An input is one frame from a hostile member.

It knows the secret, so that what is tested is what a member can do. After each story a good transfer is served, and
`check()` is clean; the caller counts threads, files and sockets (`footprint.py`).
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import zmq

from service.security.curve import guard_connector, guard_listener
from tests.transfer.pool import Pool
from tests.transfer.rig import until
from tools.fuzz.frames import Ends, to_decode, to_prefill
from tools.fuzz.source import Source
from transfer_backends.contract import FakeEngine, RankMemory, Region, Route, SourcePages, TargetPages, TransferConfig
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.liveness import ProcessMark, host_id
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.sides import KVPoll
from transfer_backends.wire import (
    Drained,
    Ping,
    Pong,
    Refused,
    Register,
    Registered,
    decode,
    encode,
    layout_of,
)

DEAD = ProcessMark(host_id(), 2**22 - 1, 1)  # of a process that there is not: what it could write to is safe at once
SECRET = b"sixteen bytes or more"
ANSWER_MS = 10_000
MAX_FRAMES = 120
MAX_PEERS = 8
COUNTED = {
    "junk_frames": "malformed",
    "protocol_errors": "out of turn",
    "refused": "refused",
    "succeeded": "good transfers' ends between them",
}
GOOD, EVIL = "good", "evil"
LAST = 424242
LAST_TRY = 255  # a frame may have named any


class Target:
    """A prefill and a decode manager of one cluster; `run` speaks to both as a member that has gone mad."""

    def __init__(self, secret: bytes | None) -> None:
        self.num_inputs = 0
        self._secret = secret
        self._rooms = itertools.count(1000)
        self._pools = [Pool(num_pages=64, page_bytes=64, seed=number) for number in range(2)]
        config = TransferConfig(
            secret=secret, bootstrap_timeout_s=0.5, max_peers=MAX_PEERS, max_orphans=64, max_tombstones=256
        )
        self.prefill = PrefillManager(self._pools[0].args, FakeEngine(), config)
        self.decode = DecodeManager(self._pools[1].args, FakeEngine(), config, lookup=self._look_up)
        self._context = zmq.Context(1)
        self._routes = {GOOD: Route(self.prefill.control_address, self.prefill.incarnation)}
        self.prefill.start()
        self.decode.start()

    def _look_up(self, bootstrap: str, room: int, any_but: object) -> Route:
        return self._routes[bootstrap]

    def run(self, data: bytes) -> None:
        """A story at either end, and then a good transfer."""
        source = Source(data)
        if source.once_in(2):
            self._attack_decode(source)
        else:
            self._attack_prefill(source)
        self._serve()
        self.prefill.check()
        self.decode.check()

    def _attack_prefill(self, source: Source) -> None:
        until(lambda: self.prefill.counters["peers"] < MAX_PEERS, what="prefill forgets peers that are gone")
        life = f"mad-{next(self._rooms)}"
        layout = layout_of(self._pools[0].args, backend="fake")
        kv, aux = Region(1 << 40, 64, 64, None), Region(1 << 41, 64, 512, None)
        lives = (self.decode.incarnation, life + "x")
        ends = Ends(life, self.prefill.incarnation, layout, kv, aux, DEAD, lives=lives, rooms=(1, 40))
        with self._socket(zmq.DEALER) as link:
            link.connect(f"tcp://{self.prefill.control_address}")
            link.send(encode(Register(life, ends.dst, layout, (RankMemory(kv, 0, 1, 0, 1, b"fake"),), aux)))
            while not isinstance(answer := decode(link.recv()), Registered):
                assert isinstance(answer, Ping), answer  # prefill asks all links whether they live when one is gone
            for _ in range(MAX_FRAMES):
                if source.is_empty:
                    break
                link.send(to_prefill(source, ends))
                self.num_inputs += 1
            self._until_read(link, ends)
        self._forget_asked()

    def _until_read(self, link: Any, ends: Ends) -> None:
        """Frames of a link are read in order: the answer to this one is the last."""
        mark = f"last of {ends.src}"
        link.send(encode(Ping(mark, ends.dst, 1)))
        while True:
            answer = decode(link.recv())
            if isinstance(answer, Refused) and answer.dst == mark:
                return

    def _forget_asked(self) -> None:
        """The role would compute it; its answer would be worth nothing to anybody."""
        for asked in self.prefill.take_recompute_requests():
            sender = self.prefill.sender(asked.room, room_attempt=asked.room_attempt)
            sender.abort("fuzz")
            until(sender.released)
            sender.close()

    def _attack_decode(self, source: Source) -> None:
        """A prefill worker that decode was sent to, and that is mad."""
        room, life = next(self._rooms), f"mad-{next(self._rooms)}"
        layout = layout_of(self._pools[1].args, backend="fake")
        with self._socket(zmq.ROUTER) as door:
            port = door.bind_to_random_port("tcp://127.0.0.1")
            self._routes[EVIL + life] = Route(f"127.0.0.1:{port}", life)
            receiver = self.decode.receiver(room, bootstrap=EVIL + life)
            link, first = door.recv_multipart()
            assert isinstance(decode(first), Register)
            door.send_multipart([link, encode(Registered(life, self.decode.incarnation, (DEAD,)))])
            until(lambda: receiver.poll() is not KVPoll.Bootstrapping)
            receiver.provide(TargetPages([1, 2, 3], 0))
            kv, aux = self._pools[1].args.kv, self._pools[1].args.aux
            ends = Ends(life, self.decode.incarnation, layout, kv, aux, DEAD, rooms=(room, 1))
            self._say(door, link, source, replace(ends, lives=(self.prefill.incarnation,)))
            receiver.abort("fuzz")
            # One that has hung up meanwhile is told nothing: its pages are safe by the proof that we are dead.
            until(
                lambda: self._told(door, link, Drained(life, ends.dst, room, 0, LAST_TRY)) and receiver.drained(),
                timeout_s=20.0,
            )
            receiver.close()
        del self._routes[EVIL + life]
        until(lambda: self.decode.counters["peers"] <= 1, timeout_s=20.0, what="decode forgets a peer that is gone")

    def _say(self, door: Any, link: bytes, source: Source, ends: Ends) -> None:
        """Until decode has read all of it, or has hung up, which is its good right."""
        for _ in range(MAX_FRAMES):
            if source.is_empty or not _send(door, link, to_decode(source, ends)):
                break
            self.num_inputs += 1
        while _send(door, link, encode(Ping(ends.src, ends.dst, LAST))):
            while door.poll(200):
                answer = decode(door.recv_multipart()[1])
                if isinstance(answer, Pong) and answer.seq == LAST:
                    return

    def _told(self, door: Any, link: bytes, message: Drained) -> bool:
        _send(door, link, encode(message))
        return True

    def _serve(self) -> None:
        room = next(self._rooms)
        sender, receiver = self.prefill.sender(room), self.decode.receiver(room, bootstrap=GOOD)
        until(lambda: receiver.poll() is KVPoll.WaitingForInput)
        receiver.provide(TargetPages([1, 2, 3], 0))
        until(lambda: sender.poll() is KVPoll.WaitingForInput)
        sender.send(SourcePages([4, 5, 6], metadata_row=0))
        until(lambda: receiver.poll() is KVPoll.Success and sender.poll() is KVPoll.Success)
        sender.close()
        receiver.close()

    @contextlib.contextmanager
    def _socket(self, kind: int) -> Iterator[Any]:
        with self._context.socket(kind) as made:
            made.setsockopt(zmq.LINGER, 0)
            made.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
            if kind == zmq.ROUTER:
                made.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if self._secret is not None and kind == zmq.ROUTER:
                guard_listener(made, self._secret)
            elif self._secret is not None:
                guard_connector(made, self._secret)
            yield made

    def result(self) -> str:
        """Offers, rooms and peers of all that was said have expired but for the good pair's own."""

        def is_empty() -> bool:
            prefill, decoding = self.prefill.counters, self.decode.counters
            offers = len(self.prefill.core.inbox)
            return (prefill["rooms"], decoding["rooms"], offers, decoding["exposed_rooms"]) == (0, 0, 0, 0) and (
                prefill["peers"] <= 1 >= decoding["peers"]
            )

        until(is_empty, timeout_s=20.0, what=f"{self.prefill.counters} {self.decode.counters}")
        counters = [manager.counters for manager in (self.prefill, self.decode)]
        return ", ".join(f"{sum(c.get(name, 0) for c in counters):,} {what}" for name, what in COUNTED.items())

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
        self._context.term()


def _send(door: Any, link: bytes, frame: bytes) -> bool:
    """False when the link is gone."""
    try:
        door.send_multipart([link, frame])
    except zmq.ZMQError:
        return False
    return True
