"""Decode's transfers, the role's calls and prefill's messages about them. Pure.

  receiver opened --route, peer live--> WaitingForInput
      --provide, first Status--> Transferring --> Success

Only Success, Drained or proof of death ends the exposure of given pages, no timer: a room exposed
past `drain_timeout_s` counts as stuck.
"""

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from transfer_backends.contract import KVArgs, Route, TargetPages
from transfer_backends.liveness import ProcessMark
from transfer_backends.sides import (
    IllegalTransition,
    KVPoll,
    Peer,
    PeerProtocolError,
    PeerTable,
    RetryTimer,
    Room,
    RoomKey,
    RoomTable,
)
from transfer_backends.wire import Abort, Drained, Recompute, Status, TransferInfo, clip, pack_ids

# ---- State of one transfer on decode, and its prefill worker. Pure.

FIRST_RETRY_S = 0.02
LONGEST_RETRY_S = 0.5
FIRST_PROOF_S = 0.02
LONGEST_PROOF_S = 1.0


@dataclass(eq=False, kw_only=True)
class PrefillPeer(Peer):
    """`marks` is () until it first registered us.

    `settled_at_s`: running time at which its last bytes have landed.
    """

    route: Route
    marks: tuple[ProcessMark, ...] = ()
    unsent_aborts: list[RoomKey] = field(default_factory=list)
    proof: RetryTimer = field(default_factory=lambda: RetryTimer(FIRST_PROOF_S, LONGEST_PROOF_S))
    settled_at_s: float | None = None

    @property
    def connecting(self) -> bool:
        return not self.registered and not self.lost


@dataclass(eq=False)
class DecodeRoom(Room):
    """Search for the prefill worker, and exposure of the pages.

    - recomputes: decode's own request: any prefill worker will do
    - partial: fewer pages than given may be written
    - error: why the handshake waits, or its last failure; failure: only the latter
    - write_try: latest reported by prefill; exposed: prefill may write to the pages
    - stuck_at_s: exposed pages count as stuck from then
    - closed: by the role, while prefill must still learn of it
    """

    bootstrap: str
    deadline_s: float
    recomputes: bool = False
    route: Route | None = None
    peer: PrefillPeer | None = None
    looking: bool = False
    retry: RetryTimer = field(default_factory=lambda: RetryTimer(FIRST_RETRY_S, LONGEST_RETRY_S))
    error: str = "the bootstrap server has not answered"
    failure: str | None = None
    num_pages: int | None = None
    partial: bool = False
    written_pages: int = 0
    metadata_row: int = 0
    write_try: int = 0
    exposed: bool = False
    stuck_at_s: float | None = None
    closed: bool = False

    @property
    def drained(self) -> bool:
        return self.final and not self.exposed

    @property
    def seeking(self) -> bool:
        return self.looking or self.retry.at_s is not None

    def end_search(self) -> None:
        self.looking, self.retry.at_s = False, None


# ---- look-ups

MAX_LOOKUPS_A_SERVER = 4


class LookUpLine:
    """Tables by server, only while a look-up is in flight.

    A server that hangs holds a thread until timeout; `MAX_LOOKUPS_A_SERVER` leaves threads for
    others.
    """

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()
        self._waiting: dict[str, dict[RoomKey, None]] = {}

    def begin(self, server: str, key: RoomKey) -> bool:
        """Return True if the look-up may start; else queue the room."""
        if self._under_way[server] >= MAX_LOOKUPS_A_SERVER:
            self._waiting.setdefault(server, {})[key] = None
            return False
        self._under_way[server] += 1
        return True

    def end(self, server: str) -> None:
        self._under_way[server] -= 1
        if self._under_way[server] <= 0:
            del self._under_way[server]

    def take(self, server: str) -> RoomKey | None:
        line = self._waiting.get(server)
        if not line:
            self._waiting.pop(server, None)
            return None
        key = next(iter(line))
        del line[key]
        return key

    def leave(self, server: str, key: RoomKey) -> None:
        line = self._waiting.get(server, {})
        line.pop(key, None)
        if not line:
            self._waiting.pop(server, None)

    def check(self, rooms: Container[RoomKey]) -> None:
        for server, line in self._waiting.items():
            assert server in self._under_way, f"rooms wait for a look-up at {server}, where none is under way"
            for key in line:
                assert key in rooms, f"room {key} waits for a look-up and is gone"


# ---- rooms

MAX_PENDING_ABORTS = 4096  # rooms aborted before prefill was found; the oldest beyond it are forgotten


@dataclass(eq=False)
class DecodeRooms(RoomTable[DecodeRoom]):
    peers: PeerTable[PrefillPeer]
    line: LookUpLine
    _: KW_ONLY
    args: KVArgs
    land_row: Callable[[int, bytes], None]
    handshake_timeout_s: float
    drain_timeout_s: float

    def __post_init__(self) -> None:
        super().__init__()
        self.num_exposed = 0
        self._pending_aborts: dict[RoomKey, None] = {}  # closed rooms still in search of their prefill worker

    def of(self, peer: PrefillPeer) -> list[DecodeRoom]:
        return [room for room in self if room.peer is peer]

    @property
    def num_pending_aborts(self) -> int:
        return len(self._pending_aborts)

    # ---- the role's calls

    def open(
        self, room: int, room_attempt: int, bootstrap: str, now_s: float, *, route: Route | None = None
    ) -> DecodeRoom:
        deadline_s = now_s + self.handshake_timeout_s
        opened = DecodeRoom((room, room_attempt), bootstrap, deadline_s, recomputes=room_attempt > 0, route=route)
        self.add(opened)
        return opened

    def provide(self, room: DecodeRoom, given: TargetPages, now_s: float) -> None:
        key, state, work, metadata_row = room.key, room.state, given.work, given.metadata_row
        assert room.recomputes == (work is not None), (
            f"room {key}: attempt 0 has a request at prefill, others bring work"
        )
        if state is KVPoll.Failed:
            return
        if state is not KVPoll.WaitingForInput or room.num_pages is not None:
            raise IllegalTransition(f"room {key}: provide in {state.name}, or twice")
        pages = np.asarray(given.pages, dtype=np.int64)
        items = [np.asarray(ids, dtype=np.int64) for ids in given.tail]
        if len(items) != len(self.args.pools):
            raise ValueError(f"room {key}: items of {len(items)} pools, there are {len(self.args.pools)}")
        self.args.check_ids(key, pages, metadata_row, items)
        packed = tuple(pack_ids(ids) for ids in items)
        assert room.peer is not None
        room.num_pages, room.metadata_row = len(pages), metadata_row
        room.partial = work is not None and work.cached
        room.progress_at_s = now_s
        self.expose(room, True)
        where = (*self.peers.address(room.peer), *key, pack_ids(pages), metadata_row)
        if work is None:
            self.peers.send(room.peer, TransferInfo(*where, given.skip_pages, packed))
        else:
            tokens = pack_ids(np.asarray(work.tokens, dtype=np.int64))
            about = (given.skip_pages, work.priority, work.share, work.namespace)
            wanted = Recompute(*where, tokens, *about, packed, work.cached, work.images, work.variant)
            self.peers.send(room.peer, wanted)

    def abort(self, room: DecodeRoom, reason: str, now_s: float) -> None:
        if not room.final:
            self.fail(room, reason, now_s)

    def close(self, room: DecodeRoom) -> None:
        """Forget the room, or keep its abort pending while prefill is searched."""
        if not room.drained:
            raise RuntimeError(f"room {room.key}: closed in {room.state.name} before its pages were drained")
        room.closed = True
        if not room.seeking:
            self.forget(room)
            return
        self._pending_aborts[room.key] = None
        if len(self._pending_aborts) > MAX_PENDING_ABORTS:
            self.forget(self[next(iter(self._pending_aborts))])

    # ---- moves

    def succeed(self, room: DecodeRoom, row: bytes, *, num_pages: int) -> None:
        room.written_pages = num_pages  # first: a handle that reads Success reads this without the lock
        if row:
            self.land_row(room.metadata_row, row)
        self.move(room, KVPoll.Success)
        self.peers.effects.counters["succeeded"] += 1

    def misfit(self, room: DecodeRoom, *, num_pages: int, row: bytes) -> str | None:
        """An error if they do not fit."""
        assert room.num_pages is not None
        if num_pages != room.num_pages and not (room.partial and num_pages < room.num_pages):
            return f"prefill wrote {num_pages} pages, {room.num_pages} were given: the two prompts differ"
        if len(row) not in (0, self.args.aux.item_bytes):
            return f"prefill sent a metadata row of {len(row)} bytes, not {self.args.aux.item_bytes}"
        return None

    def fail(self, room: DecodeRoom, reason: str, now_s: float, *, report: bool = True) -> None:
        room.reason = reason  # first: a handle that reads Failed reads this without the lock
        self.move(room, KVPoll.Failed)
        self.peers.effects.counters["failed"] += 1
        room.stuck_at_s = now_s + self.drain_timeout_s
        if report and room.peer is not None:
            self.report_abort(room, room.peer)

    def report_abort(self, room: DecodeRoom, peer: PrefillPeer) -> None:
        if peer.live:
            self.send_abort(peer, room.key, room.reason or "")
        elif peer.connecting and not room.exposed:
            peer.unsent_aborts.append(room.key)
        self.forget_if_closed(room)

    def send_abort(self, peer: PrefillPeer, key: RoomKey, reason: str) -> None:
        room = self.get(key)
        write_try = 0 if room is None else room.write_try
        self.peers.send(peer, Abort(*self.peers.address(peer), *key, clip(reason), write_try))

    def expose(self, room: DecodeRoom, exposed: bool) -> None:
        self.num_exposed += int(exposed) - int(room.exposed)
        if room.exposed != exposed:
            room.exposed = exposed
            self.touch()

    def forget_if_closed(self, room: DecodeRoom) -> None:
        if room.closed and room.key in self._rooms:
            self.forget(room)

    def forget(self, room: DecodeRoom) -> None:
        super().forget(room)
        self._pending_aborts.pop(room.key, None)
        self.line.leave(room.bootstrap, room.key)

    def check(self) -> None:
        self.line.check(self._rooms)
        assert sum(room.exposed for room in self) == self.num_exposed, "count of exposed rooms is off"
        for key in self._pending_aborts:
            assert key in self._rooms and self._rooms[key].closed, f"room {key}: a pending abort, and it is not closed"
        for room in self:
            assert not (room.exposed and room.state is KVPoll.Success), f"room {room.key}: Success with exposed pages"


# ---- messages of prefill workers about rooms


class Statuses:
    """Handlers; each raises `PeerProtocolError`, changing nothing.

    Reports of an earlier write try are counted and dropped: they end neither transfer nor exposure.
    """

    def __init__(self, rooms: DecodeRooms, counters: dict[str, int]) -> None:
        self._rooms = rooms
        self._counters = counters

    def on_status(self, peer: PrefillPeer, message: Status, now_s: float) -> None:
        room = self._addressed(peer, message)
        if room is None:
            return
        to = KVPoll(message.state)
        if message.row and to is not KVPoll.Success:
            raise PeerProtocolError(f"room {room.key}: a metadata row with {to.name}")
        if room.final:
            self._on_late(room, to)
        elif to is KVPoll.Failed:
            self._rooms.fail(room, message.reason or "prefill failed", now_s, report=False)
        elif room.num_pages is None or to not in (KVPoll.Transferring, KVPoll.Success):
            raise PeerProtocolError(f"room {room.key}: {to.name} in {room.state.name}")
        else:
            self._advance(room, message, now_s)

    def on_drained(self, peer: PrefillPeer, message: Drained, now_s: float) -> None:
        room = self._addressed(peer, message)
        if room is None:
            return
        if not room.final:
            raise PeerProtocolError(f"room {room.key}: Drained in {room.state.name}")
        self._rooms.expose(room, False)

    def _addressed(self, peer: PrefillPeer, message: Status | Drained) -> DecodeRoom | None:
        room = self._rooms.get((message.room, message.attempt))
        if room is None or room.peer is not peer or message.retry < room.write_try:
            self._counters["late_messages"] += 1
            return None
        if message.retry > room.write_try and room.num_pages is None:
            raise PeerProtocolError(f"room {room.key}: try {message.retry} before it had pages to write")
        self._counters["retried"] += message.retry - room.write_try
        room.write_try = message.retry
        return room

    def _on_late(self, room: DecodeRoom, to: KVPoll) -> None:
        self._counters["late_messages"] += 1
        if to is KVPoll.Success:
            self._rooms.expose(room, False)

    def _advance(self, room: DecodeRoom, message: Status, now_s: float) -> None:
        room.progress_at_s = now_s
        if room.state is KVPoll.WaitingForInput:
            self._rooms.move(room, KVPoll.Transferring)
        if message.state != KVPoll.Success:
            return
        self._rooms.expose(room, False)
        misfit = self._rooms.misfit(room, num_pages=message.num_pages, row=message.row)
        if misfit is None:
            self._rooms.succeed(room, message.row, num_pages=message.num_pages)
        else:
            self._rooms.fail(room, misfit, now_s, report=False)
