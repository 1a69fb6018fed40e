"""A bandwidth model in place of the transfer managers.

States are KVPoll. A message takes `control_s`. A transfer waits for both links, at the slower one's
speed; on a shared host it is a copy with a core per end.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from disagg.metadata import MetadataBuffers
from planner.executor import Host, Threads
from planner.world import Timeline
from transfer_backends.contract import PeerPath, RecomputeRequest, Route, SourcePages, TargetPages
from transfer_backends.sides import KVPoll


@dataclass(slots=True, kw_only=True, eq=False)
class Link:
    """A network port, one transfer at a time, FIFO."""

    bytes_per_s: float
    free_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class End:
    """A worker's side. `wake` schedules its loop."""

    link: Link
    metadata: MetadataBuffers
    now: Callable[[], float]
    wake: Callable[[], None]
    home: Hashable = None
    asked: list[RecomputeRequest] = field(default_factory=list)  # for prefixes, by peers


@dataclass(slots=True, eq=False)
class PlannedRoom:
    """A side is None until it opens the room."""

    key: Hashable
    prefill: End | None = None
    decode: End | None = None
    prefill_state: KVPoll = KVPoll.Bootstrapping
    decode_state: KVPoll = KVPoll.Bootstrapping
    num_pages: int | None = None
    decode_row: int = 0
    skip_pages: int = 0  # at the front, cached by decode
    sent_pages: int = 0


class Network:
    def __init__(self, timeline: Timeline, *, page_bytes: int, control_s: float, latency_s: float, host: Host) -> None:
        self._timeline = timeline
        self._page_bytes = page_bytes
        self._control_s = control_s
        self._latency_s = latency_s
        self._host = host
        self._rooms: dict[Hashable, PlannedRoom] = {}
        self.ends: dict[str, End] = {}  # of sources of prefixes, by address

    def room(self, key: Hashable) -> PlannedRoom:
        return self._rooms.setdefault(key, PlannedRoom(key))

    def forget(self, key: Hashable) -> None:
        self._rooms.pop(key, None)

    def call(self, room: PlannedRoom, source: str) -> None:
        """Open the room of a prefix at its source."""
        room.prefill = self.ends[source]
        self.shake_hands(room)

    def shake_hands(self, room: PlannedRoom) -> None:
        """Exchange decode's request and the reply, once both are there."""
        if room.prefill is not None and room.decode is not None:
            self._after_messages(2, room.decode, lambda: self._decode_moves(room, KVPoll.WaitingForInput))

    def provide(self, room: PlannedRoom, *, num_pages: int, row: int, wanted: RecomputeRequest | None) -> None:
        """`wanted`: by the receiver of a prefix."""
        room.decode_row = row
        assert room.decode is not None
        self._after_messages(1, room.decode, lambda: self._learn_pages(room, num_pages, wanted))

    def send(self, room: PlannedRoom, *, num_pages: int, row: int | None) -> None:
        """`row`: the metadata, with the last pages."""
        room.prefill_state = KVPoll.Transferring
        room.sent_pages += num_pages
        assert room.prefill is not None
        begin_s = max(room.prefill.now(), self._timeline.now_s)
        self._timeline.at(begin_s, lambda: self._move_bytes(room, num_pages * self._page_bytes, row))

    def fail(self, room: PlannedRoom) -> None:
        if room.prefill_state is not KVPoll.Success:
            room.prefill_state = KVPoll.Failed
        if room.decode_state is not KVPoll.Success:
            room.decode_state = KVPoll.Failed
        for end in (room.prefill, room.decode):
            if end is not None:
                self._timeline.at(max(end.now(), self._timeline.now_s), end.wake)

    # ---- inside

    def _after_messages(self, count: int, end: End, act: Callable[[], None]) -> None:
        self._timeline.at(max(end.now(), self._timeline.now_s) + count * self._control_s, act)

    def _decode_moves(self, room: PlannedRoom, to: KVPoll) -> None:
        if room.decode_state is not KVPoll.Failed and room.decode is not None:
            room.decode_state = to
            room.decode.wake()

    def _learn_pages(self, room: PlannedRoom, num_pages: int, wanted: RecomputeRequest | None) -> None:
        if room.prefill_state is KVPoll.Bootstrapping and room.prefill is not None:
            room.num_pages, room.prefill_state = num_pages, KVPoll.WaitingForInput
            room.prefill.asked += [] if wanted is None else [wanted]
            room.prefill.wake()

    def _move_bytes(self, room: PlannedRoom, size_bytes: int, row: int | None) -> None:
        assert room.prefill is not None and room.decode is not None
        ends = room.prefill, room.decode
        begin_s = max(self._timeline.now_s, *(end.link.free_s for end in ends))
        taken_s = size_bytes / min(end.link.bytes_per_s for end in ends)
        end_s = self._copied_s(*ends, at_s=begin_s, taken_s=taken_s)
        for end in ends:
            end.link.free_s = end_s
        if row is not None:
            self._timeline.at(end_s + self._latency_s, lambda: self._land(room, row))

    def _copied_s(self, source: End, target: End, *, at_s: float, taken_s: float) -> float:
        if source.home is None and target.home is None:
            return self._host.finish(source.link, at_s=at_s, work_s=taken_s, threads=Threads(2))
        return max(
            self._host.finish(end.link, at_s=at_s, work_s=taken_s, threads=Threads(home=end.home))
            for end in (source, target)
        )

    def _land(self, room: PlannedRoom, row: int) -> None:
        if room.prefill_state is KVPoll.Failed or room.prefill is None or room.decode is None:
            return
        _copy_row(room.prefill.metadata, row, room.decode.metadata, room.decode_row)
        room.prefill_state = KVPoll.Success
        room.prefill.wake()
        self._timeline.at(self._timeline.now_s + self._control_s, lambda: self._decode_moves(room, KVPoll.Success))


@dataclass(slots=True, eq=False)
class PlannedSender:
    network: Network
    room: PlannedRoom

    @property
    def num_pages(self) -> int | None:
        return self.room.num_pages

    @property
    def skip_pages(self) -> int:
        return self.room.skip_pages

    def poll(self) -> KVPoll:
        return self.room.prefill_state

    def send(self, source: SourcePages) -> None:
        if self.room.prefill_state is KVPoll.Failed:
            return
        end, skip = source.start + len(source.pages), self.room.skip_pages
        num_pages = max(end, skip) - max(source.start, skip)
        self.network.send(self.room, num_pages=num_pages, row=source.metadata_row)

    def abort(self, reason: str) -> None:
        self.network.fail(self.room)

    def failure(self) -> str | None:
        return "aborted" if self.room.prefill_state is KVPoll.Failed else None

    def released(self) -> bool:
        return self.room.prefill_state in (KVPoll.Success, KVPoll.Failed)

    def close(self) -> None:
        """Decode drops the room."""


@dataclass(slots=True, eq=False)
class PlannedReceiver:
    network: Network
    room: PlannedRoom
    number: int
    attempt: int

    def poll(self) -> KVPoll:
        return self.room.decode_state

    def provide(self, target: TargetPages) -> None:
        assert not target.tail, "the models of a plan have pages alone"
        self.room.skip_pages = target.skip_pages
        wanted = None
        if target.work is not None:
            assert target.work.cached, "decode workers of a plan recompute by themselves"
            wanted = RecomputeRequest(self.number, self.attempt, target.work)
        self.network.provide(self.room, num_pages=len(target.pages), row=target.metadata_row, wanted=wanted)

    def abort(self, reason: str) -> None:
        self.network.fail(self.room)

    def failure(self) -> str | None:
        return "aborted" if self.room.decode_state is KVPoll.Failed else None

    def retries(self) -> int:
        return 0

    def written_pages(self) -> int:
        return self.room.sent_pages

    def drained(self) -> bool:
        return self.room.decode_state in (KVPoll.Success, KVPoll.Failed)

    def close(self) -> None:
        self.network.forget(self.room.key)


@dataclass(slots=True)
class PlannedSenders:
    """The prefill role's manager and room directory, which finds workers without their rooms."""

    on_room: ClassVar[Sequence[Callable[[int], None]]] = ()

    network: Network
    end: End
    counters: dict[str, int] = field(default_factory=Counter)
    paths: list[PeerPath] = field(default_factory=list)

    def sender(self, room: int, *, room_attempt: int = 0, fake: bool = False) -> PlannedSender:
        found = self.network.room((room, room_attempt) if room_attempt else room)
        if not room_attempt:  # a prefix's receiver has called before
            found.prefill = self.end
            self.network.shake_hands(found)
        return PlannedSender(self.network, found)

    def take_recompute_requests(self) -> list[RecomputeRequest]:
        taken, self.end.asked = self.end.asked, []
        return taken

    def check(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class PlannedReceivers:
    """The decode role's manager."""

    network: Network
    end: End
    counters: dict[str, int] = field(default_factory=Counter)

    def receiver(
        self, room: int, *, bootstrap: str, room_attempt: int = 0, fake: bool = False, route: Route | None = None
    ) -> PlannedReceiver:
        found = self.network.room(room if route is None else (room, room_attempt))
        found.decode = self.end
        if route is None:
            self.network.shake_hands(found)
        else:
            self.network.call(found, route.control)
        return PlannedReceiver(self.network, found, room, room_attempt)

    def check(self) -> None:
        """Do nothing."""

    def close(self) -> bool:
        return True


def _copy_row(source: MetadataBuffers, row: int, target: MetadataBuffers, to: int) -> None:
    one, other = source.region, target.region
    ctypes.memmove(other.base_ptr + to * other.item_bytes, one.base_ptr + row * one.item_bytes, one.item_bytes)
