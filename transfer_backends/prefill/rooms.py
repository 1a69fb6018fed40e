"""Prefill's transfers and their states, and the calls of the role. Pure.

    sender opened --TransferInfo--> WaitingForInput --first send--> Transferring --all operations done--> Success

A failure is reported to decode at once. `Drained` follows the last operation; after a failed one, a successful fence.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from transfer_backends.contract import Gate, KVArgs
from transfer_backends.kvpoll import FINAL, IllegalTransition, KVPoll, RoomKey, TransferMachine
from transfer_backends.peers import PeerTable
from transfer_backends.prefill.inbox import Inbox, Offer
from transfer_backends.prefill.outbox import Outbox
from transfer_backends.prefill.paths import DecodePeer
from transfer_backends.prefill.posts import Chunk
from transfer_backends.prefill.reports import Reports
from transfer_backends.prefill.room import PrefillRoom, check_chunk


class PrefillRooms:
    def __init__(
        self, peers: PeerTable[DecodePeer], inbox: Inbox, outbox: Outbox, reports: Reports, *, args: KVArgs
    ) -> None:
        self.machine = TransferMachine()
        self._counters = peers.effects.counters
        self._inbox = inbox
        self._outbox = outbox
        self._reports = reports
        self._args = args
        self._rooms: dict[RoomKey, PrefillRoom] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[PrefillRoom]:
        return iter(list(self._rooms.values()))

    def get(self, key: RoomKey) -> PrefillRoom | None:
        return self._rooms.get(key)

    def of(self, incarnation: str) -> list[PrefillRoom]:
        return [room for room in self if room.offer is not None and room.offer.incarnation == incarnation]

    # ---- the role's calls

    def open(self, room: int, room_attempt: int, now_s: float) -> PrefillRoom:
        """Raises `RoomInUse` for a live room and ValueError for an invalid number."""
        key = (room, room_attempt)
        self.machine.open(key)
        self._rooms[key] = opened = PrefillRoom(key, opened_at_s=now_s)
        offer, tombstone = self._inbox.take(key), self._inbox.exhume(key)
        if offer is not None:
            self.accept(opened, offer)
        elif tombstone is not None and tombstone.by_peer:
            self.fail(opened, tombstone.reason)
        return opened

    def send(
        self,
        key: RoomKey,
        src_pages: Sequence[int],
        *,
        start: int,
        last: bool,
        metadata_row: int | None,
        now_s: float,
        gate: Gate | None = None,
    ) -> None:
        """Raises ValueError for our own mistakes. A count that differs from decode's fails the room."""
        room, state = self._rooms[key], self.machine.state(key)
        if state is KVPoll.Failed:
            return
        if state in (KVPoll.Bootstrapping, KVPoll.Success) or room.all_queued:
            raise IllegalTransition(f"room {key}: send in {state.name}{' after the last chunk' * room.all_queued}")
        src = np.asarray(src_pages, dtype=np.int64)
        check_chunk(room, src, args=self._args, start=start, last=last, metadata_row=metadata_row, gate=gate)
        room.queue(Chunk(src, start, metadata_row if last else None, gate), last=last)
        if state is KVPoll.WaitingForInput:
            self.machine.move(key, KVPoll.Transferring)
            # Decode's timeout runs from here, or, if the pages are still to be computed, from when they land.
            if last:
                room.reported_at_s = now_s
            elif gate is None:
                self._reports.progress(room, now_s)
        if room.misfit is not None:
            self.fail(room, room.misfit)
            return
        room.progress_at_s = now_s
        self._outbox.add(room)

    def abort(self, key: RoomKey, reason: str) -> None:
        if self.machine.state(key) not in FINAL:
            self.fail(self._rooms[key], reason)

    def released(self, key: RoomKey) -> bool:
        return self.machine.state(key) in FINAL and self._rooms[key].quiet

    def close(self, key: RoomKey, now_s: float) -> None:
        if not self.released(key):
            raise RuntimeError(f"room {key}: closed in {self.machine.state(key).name} before its pages were released")
        self.machine.forget(key)
        room = self._rooms.pop(key)
        self._inbox.bury(key, room.reason or "the transfer has ended", by_peer=False, now_s=now_s)

    # ---- moves

    def accept(self, room: PrefillRoom, offer: Offer) -> None:
        room.offer = offer
        self.machine.move(room.key, KVPoll.WaitingForInput)

    def succeed(self, room: PrefillRoom) -> None:
        self.machine.move(room.key, KVPoll.Success)
        self._counters["succeeded"] += 1
        self._reports.status(room, KVPoll.Success)

    def fail(self, room: PrefillRoom, reason: str, *, report: bool = True) -> None:
        self.machine.move(room.key, KVPoll.Failed)
        self._counters["failed"] += 1
        room.reason = reason
        room.end()
        room.owes_drained = room.offer is not None
        if report:
            self._reports.status(room, KVPoll.Failed)
            self._reports.drained(room)

    def fail_all_of(self, incarnation: str, reason: str) -> None:
        for room in self.of(incarnation):
            if self.machine.state(room.key) not in FINAL:
                self.fail(room, reason)

    def check(self) -> None:
        assert list(self.machine) == list(self._rooms), "rooms and states differ"
        for room in self:
            room.check()
            success = self.machine.state(room.key) is KVPoll.Success
            assert room.quiet or not success, f"room {room.key}: operations in Success"
