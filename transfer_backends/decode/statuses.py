"""Prefill's reports about rooms. Pure.

Reports of an earlier write try are counted and dropped: they end neither transfer nor exposure.
"""

from collections import Counter

from transfer_backends.decode.connections import PrefillPeer
from transfer_backends.decode.room import DecodeRoom
from transfer_backends.decode.rooms import DecodeRooms
from transfer_backends.kvpoll import KVPoll, PeerProtocolError
from transfer_backends.wire import Drained, Status


class Statuses:
    """Handlers; each raises `PeerProtocolError`, changing nothing."""

    def __init__(self, rooms: DecodeRooms, counters: Counter[str]) -> None:
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
