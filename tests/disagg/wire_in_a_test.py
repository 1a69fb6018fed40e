"""Transfers between two engines of one test: handles with the contract's states, moved on by explicit steps.

Every message and every write is an event of its own and happens when the test draws it, in order per room and
direction: late, interleaved with everything else, also after one side has given up. Writes copy the hash model's KV,
so a page that was reused too early shows up as wrong KV.
"""

import functools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disagg.metadata import MetadataBuffers
from tests.core.hash_model import HashModel
from transfer_backends.contract import PeerPath, RecomputeRequest, Route, SourcePages, TargetPages
from transfer_backends.sides import KVPoll, RoomKey

FINAL = (KVPoll.Failed, KVPoll.Success)


@dataclass
class Side:
    """State of one room on one side. `settled`: no write touches this side's pages for this room any more."""

    state: KVPoll = KVPoll.Bootstrapping
    reason: str | None = None
    settled: bool = True
    closed: bool = False


@dataclass
class Room:
    prefill: Side | None = None
    decode: Side | None = None
    dst: list[int] = field(default_factory=list)
    dst_row: int = 0
    skip_pages: int = 0
    tail: list[list[int]] = field(default_factory=list)
    num_sent: int = 0  # pages
    to_prefill: deque[Callable[[], None]] = field(default_factory=deque)
    to_decode: deque[Callable[[], None]] = field(default_factory=deque)
    writes: deque[Callable[[], None]] = field(default_factory=deque)
    sealed: bool = False  # prefill will post nothing more
    recomputes: bool = False  # decode's message is the request
    buried: str | None = None  # decode gave up before prefill opened it


@dataclass(frozen=True)
class Gated:
    """A write of pages that step `step` computes: it is not posted before."""

    step: int
    act: Callable[[], None]

    def __call__(self) -> None:
        self.act()


class Wire:
    """What crosses from one engine to another. `step` lets one drawn event happen; False when none is left."""

    def __init__(self, *, prefill: HashModel, decode: HashModel, rows: tuple[MetadataBuffers, MetadataBuffers]) -> None:
        self.models = (prefill, decode)
        self.rows = rows
        self.rooms: dict[RoomKey, Room] = {}
        self.recompute_requests: list[RecomputeRequest] = []
        self.num_gated = 0
        self.num_skipped = 0
        self.num_states = 0  # copied, and pages of windows
        self.num_windows = 0
        self.copied: list[int] = []  # decode's pages, in order
        self.unreachable = False  # the handshake of a room that recomputes fails

    def room(self, number: int, attempt: int = 0) -> Room:
        return self.rooms.setdefault((number, attempt), Room())

    def sender(self, room: int, room_attempt: int = 0) -> "Sender":
        entry = self.room(room, room_attempt)
        assert entry.prefill is None, "a room is opened twice"
        entry.prefill = Side()
        if entry.buried is not None:
            _fail(entry.prefill, entry.buried)
        elif room_attempt:
            _advance(entry.prefill, KVPoll.WaitingForInput)
        return Sender(self, entry)

    def take_recompute_requests(self) -> list[RecomputeRequest]:
        taken, self.recompute_requests = self.recompute_requests, []
        return taken

    def receiver(self, room: int, room_attempt: int = 0) -> "Receiver":
        entry = self.room(room, room_attempt)
        assert entry.decode is None, "a room is opened twice"
        side = entry.decode = Side()
        gone = room_attempt > 0 and self.unreachable
        handshake = (
            (lambda: _fail(side, "no worker is there")) if gone else lambda: _advance(side, KVPoll.WaitingForInput)
        )
        entry.to_decode.append(handshake)
        return Receiver(self, entry, (room, room_attempt))

    def step(self, rng: random.Random) -> bool:
        if not (events := self.events()):
            return False
        rng.choice(events).popleft()()
        return True

    def events(self) -> list[deque[Callable[[], None]]]:
        """What may happen next: the first of each."""
        return [queue for room in self.rooms.values() for queue in self._ready(room) if queue]

    def _ready(self, room: Room) -> list[deque[Callable[[], None]]]:
        """Decode's messages wait for prefill's side to exist, as orphans would."""
        writes = deque() if room.writes and self.is_shut(room.writes[0]) else room.writes
        return [room.to_decode, writes, room.to_prefill if room.prefill or room.recomputes else deque()]

    def is_shut(self, write: Callable[[], None]) -> bool:
        return isinstance(write, Gated) and write.step > self.models[0].last_seq

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        source, target = self.models
        self.copied += dst
        for s, d in zip(src, dst, strict=True):
            for offset in range(source.page_size):
                if (s, offset) in source.kv:
                    target.kv[d, offset] = source.kv[s, offset]

    def copy_states(self, src: Sequence[int], dst: Sequence[int]) -> None:
        source, target = self.models
        for s, d in zip(src, dst, strict=True):
            target.states[d] = source.states[s]
            self.num_states += 1

    def copy_windows(self, src: Sequence[int], dst: Sequence[int]) -> None:
        source, target = self.models
        for s, d in zip(src, dst, strict=True):
            self.num_windows += 1
            for offset in range(source.page_size):
                if (s, offset) in source.window_kv:
                    target.window_kv[d, offset] = source.window_kv[s, offset]

    @property
    def _copies_beside(self) -> list[Callable[[Sequence[int], Sequence[int]], None]]:
        """Of each pool beside pages, as `Memory.tail` has them."""
        model = self.models[0]
        return [self.copy_states] * bool(model.states) + [self.copy_windows] * bool(model.window)

    def copy_row(self, src: int, dst: int) -> None:
        self.rows[1]._rows[dst] = self.rows[0]._rows[src]


def _advance(side: Side, state: KVPoll) -> None:
    if side.state not in FINAL:
        side.state = state


def _fail(side: Side, reason: str) -> None:
    if side.state not in FINAL:
        side.state, side.reason = KVPoll.Failed, reason


class Ends:
    """A manager. `out`: the wire of a room that it sends; `into`: of what it gets from the peer of that address, or from prefill.

    `asked`: by which peers ask for work.
    """

    def __init__(
        self, out: Callable[[int], Wire] | None, into: Callable[[str], Wire] | None = None, asked: Sequence[Wire] = ()
    ) -> None:
        self._out, self._into, self._asked = out, into, asked
        self.on_room = ()  # its directory is perfect
        self.counters: dict[str, int] = {}

    @classmethod
    def of(cls, wire: Wire) -> "Ends":
        """Either end of it."""
        return cls(lambda room: wire, lambda control: wire, [wire])

    def sender(self, room: int, *, room_attempt: int = 0, fake: bool = False) -> "Sender":
        assert self._out is not None, "it sends nothing"
        return self._out(room).sender(room, room_attempt)

    def receiver(
        self, room: int, *, bootstrap: str, room_attempt: int = 0, fake: bool = False, route: Route | None = None
    ) -> "Receiver":
        assert self._into is not None, "it gets nothing"
        return self._into("" if route is None else route.control).receiver(room, room_attempt)

    @property
    def paths(self) -> list[PeerPath]:
        return [PeerPath(peer="d", address="10.0.0.7", near=None, transport="tcp", bytes_a_s=2.5e9, at_unix_s=1.0)]

    def take_recompute_requests(self) -> list[RecomputeRequest]:
        return [asked for wire in self._asked for asked in wire.take_recompute_requests()]

    def check(self) -> None:
        """Nothing to check."""

    def close(self) -> bool:
        return True


class Handle:
    """One side of a room."""

    def __init__(self, wire: Wire, room: Room, side: Side | None) -> None:
        assert side is not None
        self._wire, self._room, self._side = wire, room, side

    def poll(self) -> KVPoll:
        return self._side.state

    def failure(self) -> str | None:
        return self._side.reason

    def abort(self, reason: str) -> None:
        if self._side.state not in FINAL:
            _fail(self._side, reason)
            self._say_aborted(reason)

    def _say_aborted(self, reason: str) -> None:
        raise NotImplementedError

    def _is_safe(self) -> bool:
        """No write touches this side's pages any more."""
        raise NotImplementedError

    def close(self) -> None:
        assert self._side.state in FINAL and self._is_safe() and not self._side.closed
        self._side.closed = True


class Sender(Handle):
    def __init__(self, wire: Wire, room: Room) -> None:
        super().__init__(wire, room, room.prefill)

    @property
    def num_pages(self) -> int | None:
        return len(self._room.dst) or None

    @property
    def skip_pages(self) -> int:
        return self._room.skip_pages

    def send(self, source: SourcePages) -> None:
        if self._side.state in FINAL:
            return
        room, side = self._room, self._side
        assert side.state is not KVPoll.Bootstrapping, "decode has not said where the pages go"
        row, gate = source.metadata_row, source.gate
        src = source.pages[max(0, room.skip_pages - source.start) :]
        first = max(0, source.start - room.skip_pages)
        dst = room.dst[first : first + len(src)]
        assert len(dst) == len(src)
        _advance(side, KVPoll.Transferring)
        room.num_sent += len(src)
        for s, d in zip(src, dst, strict=True):
            write = functools.partial(self._wire.copy_pages, [s], [d])
            room.writes.append(write if gate is None else Gated(gate.step, write))
            self._wire.num_gated += gate is not None
        if row is not None:
            assert gate is None
            for copy, here, there in zip(self._wire._copies_beside, source.tail, room.tail, strict=True):
                assert len(here) == len(there) or (room.recomputes and len(here) < len(there))
                room.writes.append(functools.partial(copy, here, there[: len(here)]))
            room.writes.append(lambda: self._wire.copy_row(row, room.dst_row))
            room.writes.append(self._landed)

    def _landed(self) -> None:
        if self._side.state in FINAL:
            return
        self._side.state = KVPoll.Success
        decode = self._room.decode
        assert decode is not None
        self._room.to_decode.append(lambda: _succeed(decode))

    def _say_aborted(self, reason: str) -> None:
        self._seal()
        if (decode := self._room.decode) is not None:
            self._room.to_decode.append(lambda: _fail(decode, reason))

    def _seal(self) -> None:
        """Post nothing more. What is posted still lands, and only then does decode learn that the room is over."""
        room = self._room
        if room.sealed:
            return
        room.sealed = True
        for write in [write for write in room.writes if self._wire.is_shut(write)]:
            room.writes.remove(write)
        room.writes.append(lambda: room.to_decode.append(lambda: _settle(room)))

    def released(self) -> bool:
        return self._side.state in FINAL and self._is_safe()

    def _is_safe(self) -> bool:
        return not self._room.writes


def _succeed(decode: Side) -> None:
    if decode.state not in FINAL:
        decode.state = KVPoll.Success
    decode.settled = True


def _settle(room: Room) -> None:
    if room.decode is not None:
        room.decode.settled = True


class Receiver(Handle):
    def __init__(self, wire: Wire, room: Room, key: RoomKey) -> None:
        super().__init__(wire, room, room.decode)
        self._key = key

    def provide(self, target: TargetPages) -> None:
        if self._side.state in FINAL:
            return
        room, side, work = self._room, self._side, target.work
        side.settled, room.recomputes = False, work is not None
        _advance(side, KVPoll.Transferring)

        def arrive() -> None:
            room.dst, room.dst_row = list(target.pages), target.metadata_row
            room.skip_pages, room.tail = target.skip_pages, [list(ids) for ids in target.tail]
            if work is not None:
                self._wire.recompute_requests.append(RecomputeRequest(*self._key, work))
                return
            self._wire.num_skipped += target.skip_pages
            assert room.prefill is not None
            if room.prefill.state in FINAL:  # prefill gave up before: it never wrote
                room.to_decode.append(lambda: _fail(side, room.prefill.reason or "prefill gave up"))
                room.to_decode.append(lambda: _settle(room))
            else:
                _advance(room.prefill, KVPoll.WaitingForInput)

        room.to_prefill.append(arrive)

    def _say_aborted(self, reason: str) -> None:
        room = self._room

        def arrive() -> None:
            if room.prefill is None:
                room.buried = reason
                room.to_decode.append(lambda: _settle(room))
                return
            if room.prefill.state is KVPoll.Success:
                room.to_decode.append(lambda: _settle(room))
                return
            _fail(room.prefill, reason)
            Sender(self._wire, room)._seal()

        room.to_prefill.append(arrive)

    def retries(self) -> int:
        return 0

    def written_pages(self) -> int:
        return self._room.num_sent

    def drained(self) -> bool:
        return self._is_safe()

    def _is_safe(self) -> bool:
        return self._side.settled
