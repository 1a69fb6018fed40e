"""Decode's transfers and their states, and the calls of the role. Pure.

    receiver opened --route, peer live--> WaitingForInput --provide, first Status--> Transferring --> Success

Pages of `provide` are exposed until prefill reports Success or Drained, or is proven dead. No timer ends that: a room that is
exposed past `drain_timeout_s` counts as stuck.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from transfer_backends.contract import KVArgs, Work
from transfer_backends.decode.connections import PrefillPeer
from transfer_backends.decode.lookup_line import LookUpLine
from transfer_backends.decode.room import DecodeRoom
from transfer_backends.kvpoll import FINAL, IllegalTransition, KVPoll, RoomKey, TransferMachine
from transfer_backends.peers import PeerTable
from transfer_backends.wire import Abort, Recompute, TransferInfo, clip, pack_ids

MAX_PENDING_ABORTS = 4096  # rooms given up before prefill could learn of it; beyond it the oldest are forgotten


class DecodeRooms:
    def __init__(
        self,
        peers: PeerTable[PrefillPeer],
        line: LookUpLine,
        *,
        args: KVArgs,
        handshake_timeout_s: float,
        drain_timeout_s: float,
    ) -> None:
        self.machine = TransferMachine()
        self.num_exposed = 0
        self._peers = peers
        self._line = line
        self._args = args
        self._handshake_timeout_s = handshake_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._rooms: dict[RoomKey, DecodeRoom] = {}
        self._pending_aborts: dict[RoomKey, None] = {}  # closed rooms whose prefill worker is still looked for

    def __len__(self) -> int:
        """Rooms that the role uses."""
        return len(self._rooms) - len(self._pending_aborts)

    def __iter__(self) -> Iterator[DecodeRoom]:
        return iter(list(self._rooms.values()))

    def get(self, key: RoomKey) -> DecodeRoom | None:
        return self._rooms.get(key)

    def of(self, peer: PrefillPeer) -> list[DecodeRoom]:
        return [room for room in self if room.peer is peer]

    @property
    def num_pending_aborts(self) -> int:
        return len(self._pending_aborts)

    # ---- the role's calls

    def open(self, room: int, room_attempt: int, bootstrap: str, now_s: float) -> DecodeRoom:
        """Raises `RoomInUse` for a live room and ValueError for an invalid number."""
        key = (room, room_attempt)
        self.machine.open(key)
        deadline_s = now_s + self._handshake_timeout_s
        self._rooms[key] = opened = DecodeRoom(key, bootstrap, deadline_s, recomputes=room_attempt > 0)
        return opened

    def provide(
        self,
        key: RoomKey,
        dst_pages: Sequence[int],
        metadata_row: int,
        now_s: float,
        work: Work | None = None,
        *,
        skip_pages: int = 0,
    ) -> None:
        """`work`: for a room that recomputes; it has a `skip_pages` of its own."""
        room, state = self._rooms[key], self.machine.state(key)
        assert room.recomputes == (work is not None), (
            f"room {key}: attempt 0 has a request at prefill, others bring work"
        )
        if state is KVPoll.Failed:
            return
        if state is not KVPoll.WaitingForInput or room.num_pages is not None:
            raise IllegalTransition(f"room {key}: provide in {state.name}, or twice")
        pages = np.asarray(dst_pages, dtype=np.int64)
        if len(pages) and not (pages.min() >= 0 and pages.max() < self._args.kv.num_items):
            raise ValueError(f"room {key}: a page is outside the pool of {self._args.kv.num_items}")
        if not 0 <= metadata_row < self._args.aux.num_items:
            raise ValueError(f"room {key}: metadata_row {metadata_row} is outside 0..{self._args.aux.num_items - 1}")
        assert room.peer is not None
        room.num_pages = len(pages)
        room.progress_at_s = now_s
        self.expose(room, True)
        where = (*self._peers.address(room.peer), *key, pack_ids(pages), metadata_row)
        info = TransferInfo(*where, skip_pages) if work is None else Recompute(*where, *_wire_work(work))
        self._peers.send(room.peer, info)

    def abort(self, key: RoomKey, reason: str, now_s: float) -> None:
        if self.machine.state(key) not in FINAL:
            self.fail(self._rooms[key], reason, now_s)

    def drained(self, key: RoomKey) -> bool:
        return self.machine.state(key) in FINAL and not self._rooms[key].exposed

    def close(self, key: RoomKey) -> None:
        """Forget the room, or keep its abort pending while its prefill worker is looked for."""
        if not self.drained(key):
            raise RuntimeError(f"room {key}: closed in {self.machine.state(key).name} before its pages were drained")
        room = self._rooms[key]
        room.closed = True
        if not room.seeking:
            self._forget(room)
            return
        self._pending_aborts[key] = None
        if len(self._pending_aborts) > MAX_PENDING_ABORTS:
            self._forget(self._rooms[next(iter(self._pending_aborts))])

    # ---- moves

    def fail(self, room: DecodeRoom, reason: str, now_s: float, *, report: bool = True) -> None:
        self.machine.move(room.key, KVPoll.Failed)
        self._peers.effects.counters["failed"] += 1
        room.reason = reason
        room.stuck_at_s = now_s + self._drain_timeout_s
        if report and room.peer is not None:
            self.report_abort(room, room.peer)

    def report_abort(self, room: DecodeRoom, peer: PrefillPeer) -> None:
        """Send the abort now, or once prefill has answered the registration."""
        if peer.live:
            self.send_abort(peer, room.key, room.reason or "")
        elif peer.connecting and not room.exposed:
            peer.unsent_aborts.append(room.key)
        self.forget_if_closed(room)

    def send_abort(self, peer: PrefillPeer, key: RoomKey, reason: str) -> None:
        room = self._rooms.get(key)
        write_try = 0 if room is None else room.write_try
        self._peers.send(peer, Abort(*self._peers.address(peer), *key, clip(reason), write_try))

    def expose(self, room: DecodeRoom, exposed: bool) -> None:
        self.num_exposed += int(exposed) - int(room.exposed)
        if room.exposed != exposed:
            room.exposed = exposed
            self.machine.touch()

    def forget_if_closed(self, room: DecodeRoom) -> None:
        if room.closed and room.key in self._rooms:
            self._forget(room)

    def _forget(self, room: DecodeRoom) -> None:
        self.machine.forget(room.key)
        del self._rooms[room.key]
        self._pending_aborts.pop(room.key, None)
        self._line.leave(room.bootstrap, room.key)

    def check(self) -> None:
        self._line.check(self._rooms)
        assert list(self.machine) == list(self._rooms), "rooms and states differ"
        assert sum(room.exposed for room in self) == self.num_exposed, "count of exposed rooms is off"
        for key in self._pending_aborts:
            assert key in self._rooms and self._rooms[key].closed, f"room {key}: a pending abort, and it is not closed"
        for room in self:
            success = self.machine.state(room.key) is KVPoll.Success
            assert not (room.exposed and success), f"room {room.key}: Success with exposed pages"


def _wire_work(work: Work) -> tuple[bytes, int, int, bool]:
    return pack_ids(np.asarray(work.tokens, dtype=np.int64)), work.skip_pages, work.priority, work.share
