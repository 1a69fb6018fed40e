"""Prefill's transfers: the role's calls, transitions, reports to decode. Pure.

  sender opened --TransferInfo--> WaitingForInput
      --first send--> Transferring --all operations done--> Success

`Drained` follows the last operation, after a failure a fence.
"""

from transfer_backends.contract import KVArgs
from transfer_backends.kvpoll import IllegalTransition, KVPoll, RoomKey
from transfer_backends.peers import PeerTable
from transfer_backends.prefill.inbox import Inbox, Offer
from transfer_backends.prefill.outbox import Outbox
from transfer_backends.prefill.paths import DecodePeer, Paths
from transfer_backends.prefill.posts import Chunk
from transfer_backends.prefill.room import PrefillRoom, check_chunk
from transfer_backends.rooms import RoomTable
from transfer_backends.wire import Status, clip


class PrefillRooms(RoomTable[PrefillRoom]):
    def __init__(
        self, peers: PeerTable[DecodePeer], paths: Paths, inbox: Inbox, outbox: Outbox, *, args: KVArgs
    ) -> None:
        super().__init__()
        self._peers = peers
        self._counters = peers.effects.counters
        self._paths = paths
        self._inbox = inbox
        self._outbox = outbox
        self._args = args

    def of(self, peer: DecodePeer) -> list[PrefillRoom]:
        return [room for room in self if room.peer is peer]

    # ---- the role's calls

    def open(self, room: int, room_attempt: int, now_s: float) -> PrefillRoom:
        """Raises `RoomInUse`, and ValueError for an invalid number."""
        opened = PrefillRoom((room, room_attempt), opened_at_s=now_s)
        self.add(opened)
        offer, tombstone = self._inbox.take(opened.key), self._inbox.exhume(opened.key)
        if offer is not None:
            self.accept(opened, offer)
        elif tombstone is not None and tombstone.by_peer:
            self.fail(opened, tombstone.reason)
        return opened

    def send(self, room: PrefillRoom, chunk: Chunk, now_s: float) -> None:
        """Raises ValueError for our own mistakes; a page count unlike decode's fails the room."""
        state = room.state
        if state is KVPoll.Failed:
            return
        if state in (KVPoll.Bootstrapping, KVPoll.Success) or room.all_queued:
            raise IllegalTransition(f"room {room.key}: send in {state.name}{' after the last chunk' * room.all_queued}")
        check_chunk(room, chunk, self._args)
        room.queue(chunk)
        if state is KVPoll.WaitingForInput:
            self.move(room, KVPoll.Transferring)
            # Decode's timeout runs from here, or from the landing of pages still to be computed.
            if chunk.last:
                room.reported_at_s = now_s
            elif chunk.gate is None:
                self.report_progress(room, now_s)
        if room.misfit is not None:
            self.fail(room, room.misfit)
            return
        room.progress_at_s = now_s
        if room.written:
            self.succeed(room)
        else:
            self._outbox.add(room)

    def abort(self, room: PrefillRoom, reason: str) -> None:
        if not room.final:
            self.fail(room, reason)

    def close(self, room: PrefillRoom, now_s: float) -> None:
        if not room.released:
            raise RuntimeError(f"room {room.key}: closed in {room.state.name} before its pages were released")
        self.forget(room)
        self._inbox.bury(room.key, room.reason or "the transfer has ended", by_peer=False, now_s=now_s)

    # ---- moves

    def accept(self, room: PrefillRoom, offer: Offer) -> None:
        room.offer = offer
        self.move(room, KVPoll.WaitingForInput)

    def succeed(self, room: PrefillRoom) -> None:
        self.move(room, KVPoll.Success)
        self._counters["succeeded"] += 1
        self._report(room, KVPoll.Success)

    def fail(self, room: PrefillRoom, reason: str, *, report: bool = True) -> None:
        room.reason = reason  # first: a handle that reads Failed reads this without the lock
        self.move(room, KVPoll.Failed)
        self._counters["failed"] += 1
        room.end()
        room.owes_drained = room.offer is not None
        if report:
            self._report(room, KVPoll.Failed)
            self.report_drained(room)

    def fail_all_of(self, peer: DecodePeer, reason: str) -> None:
        for room in self.of(peer):
            self.abort(room, reason)

    # ---- reports to decode

    def report_progress(self, room: PrefillRoom, now_s: float) -> None:
        room.reported_at_s = now_s
        self._report(room, KVPoll.Transferring)

    def report_drained(self, room: PrefillRoom) -> None:
        if room.owes_drained and room.quiet and room.peer is not None:
            room.owes_drained = False
            self._paths.drained(room.peer, room.key, room.write_try)

    def reject(self, peer: DecodePeer, key: RoomKey, reason: str) -> None:
        """Fail a room of decode that does not exist here."""
        self._peers.send(peer, Status(*self._peers.address(peer), *key, KVPoll.Failed, 0, clip(reason)))
        self._paths.drained(peer, key, 0)

    def _report(self, room: PrefillRoom, state: KVPoll) -> None:
        if room.peer is not None:
            reason = clip(f"prefill: {room.reason}") if room.reason else ""
            num_pages = room.done_bytes // room.peer.path.page_bytes
            row = room.row if state is KVPoll.Success else b""
            what = (*self._peers.address(room.peer), *room.key, state, num_pages, reason, room.write_try, row)
            self._peers.send(room.peer, Status(*what))

    def check(self) -> None:
        for room in self:
            room.check()
