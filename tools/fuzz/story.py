"""A story of frames, local calls and time at a fresh pair of pure cores; and what must hold in it and after it.

Two decode workers are registered and three rooms open. At every step `check()` is clean and each planned write lies in
memory that its own decode worker named; afterwards the peers vanish, time passes, and nothing may be left: no room, peer,
session, offer or table without a bound.
"""

import contextlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import note

from tools.fuzz.frames import Ends, offer, register, to_decode, to_prefill
from tools.fuzz.source import Source
from transfer_backends.contract import Caps, KVArgs, RankMemory, Region, Route, TargetPages, TransferConfig
from transfer_backends.decode.lookup import Connect
from transfer_backends.decode.manager import DecodeCore
from transfer_backends.liveness import Liveness, ProcessMark
from transfer_backends.prefill.core import PrefillCore
from transfer_backends.prefill.inbox import Chunk
from transfer_backends.prefill.paths import ConnectPeer, FencePeer
from transfer_backends.prefill.rooms import PrefillRoom
from transfer_backends.sides import IllegalTransition, KVPoll, PeerProtocolError, RoomInUse, RoomKey
from transfer_backends.wire import MalformedFrame, Register, decode, encode, layout_of

NUM_PAGES, NUM_ROWS, PAGE_BYTES, ROW_BYTES = 32, 8, 1024, 64
KV, AUX = Region(1 << 40, NUM_PAGES, PAGE_BYTES, None), Region(1 << 41, NUM_ROWS, ROW_BYTES, None)
THEIR_KV = tuple(
    Region(base << 40, pages, PAGE_BYTES, None) for base, pages in ((3, NUM_PAGES), (5, 16), (11, NUM_PAGES))
)
THEIR_AUX = tuple(Region(base << 40, rows, ROW_BYTES, None) for base, rows in ((7, NUM_ROWS), (9, 2), (13, NUM_ROWS)))
ARGS = KVArgs(KV, AUX, "m", 16, "f32")
CAPS = Caps(
    name="fuzz",
    max_inflight=64,
    max_inflight_bytes=1 << 20,
    max_post_pieces=4,
    max_post_bytes=1 << 20,
    max_piece_bytes=2048,
    target_must_poll=False,
    settle_s=0.1,
    resend_s=0.1,
)
CONFIG = TransferConfig(
    bootstrap_timeout_s=5.0,
    waiting_timeout_s=5.0,
    transfer_timeout_s=5.0,
    handshake_timeout_s=2.0,
    drain_timeout_s=5.0,
    max_peers=4,
    max_orphans=2,
    max_tombstones=4,
)
PREFILL, DECODES = "prefill-life", ("decode-life", "decode-two", "decode-late")
BOOTSTRAP = "127.0.0.1:8998"
LAYOUT = layout_of(ARGS, backend="fuzz")
MARK = ProcessMark("h", 1, 1)
TO_PREFILL = tuple(
    Ends(name, PREFILL, LAYOUT, kv, aux, MARK, lives=DECODES)
    for name, kv, aux in zip(DECODES, THEIR_KV, THEIR_AUX, strict=True)
)
TO_DECODE = Ends(PREFILL, DECODES[0], LAYOUT, KV, AUX, MARK, lives=DECODES)
NUM_LINKS = len(DECODES)  # of prefill; the last one has not registered at first
CALLS = ("open", "send", "provide", "engine", "route", "take", "close", "abort", "drop")
MAX_STEPS = 80
GIVEN_ROW = 5


@dataclass
class Story:
    """`num_frames` were read, `num_taken` of them were messages that were acted on or answered, `num_writes` operations of

    the engine came of them. `steps` tells what was done: read it when a story fails.
    """

    now_s: float = 0.0
    num_frames: int = 0
    num_taken: int = 0
    num_writes: int = 0
    posts: list[Any] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefill = PrefillCore(incarnation=PREFILL, marks=(MARK,), kv_args=ARGS, caps=CAPS, config=CONFIG)
        self.decode = DecodeCore(
            incarnation=DECODES[0],
            kv_args=ARGS,
            caps=CAPS,
            descriptor=b"d",
            config=CONFIG,
            land_row=self.land_row,
        )
        self.links: set[int] = set()
        self.named: dict[str, list[Region]] = {}
        for number, ends in enumerate(TO_PREFILL[:-1]):
            message = Register(ends.src, PREFILL, LAYOUT, (RankMemory(ends.kv, 0, 1, 0, 1, b"d"),), ends.aux)
            self.read_at_prefill(encode(message), number)
        self.settle()
        for room in (1, 2, 3):
            self.open(room)
        self.route(1)

    def run(self, data: bytes) -> None:
        source = Source(data)
        while not source.is_empty and len(self.steps) < MAX_STEPS:
            self.step(source)
            self.settle()
            self.assert_sound()
        self.end()

    def assert_sound(self) -> None:
        """Both cores' own checks, and that what peers can fill has an end."""
        self.prefill.check()
        self.decode.check()
        inbox = self.prefill.inbox
        assert len(inbox) <= CONFIG.max_orphans and len(inbox._tombstones) <= CONFIG.max_tombstones
        assert len(self.prefill.peers) <= CONFIG.max_peers and len(self.decode.peers) <= CONFIG.max_peers

    def step(self, source: Source) -> None:
        kind = source.below(16)
        if kind < 6:
            link = source.below(NUM_LINKS)
            self.read_at_prefill(to_prefill(source, TO_PREFILL[link]), link)
        elif kind < 10:
            self.read_at_decode(to_decode(source, TO_DECODE), source.pick(sorted(self.links) or [0]))
        elif kind < 12:
            link, room = source.below(NUM_LINKS), 1 + source.below(3)
            if link == NUM_LINKS - 1:
                self.read_at_prefill(register(source, TO_PREFILL[link]), link)
            self.read_at_prefill(offer(source, TO_PREFILL[link], room), link)
            self.call("send", room)
        elif kind < 15:
            self.call(source.pick(CALLS), 1 + source.below(6))
        else:
            self.tick(source.pick((0.0, 0.1, 1.0, 3.0)))

    def read_at_prefill(self, frame: bytes, link: int) -> None:
        self.steps.append(f"prefill reads {frame.hex()} on link {link}")
        with self.reading():
            message = decode(frame)
            others, known = self.rooms_of_others(message.src), self.prefill.peers.get(message.src)
            try:
                self.prefill.on_message(f"link-{link}", message, self.now_s)
            finally:
                assert self.rooms_of_others(message.src).items() >= others.items(), (
                    "a room of another decode worker moved"
                )
            if isinstance(message, Register) and self.prefill.peers.get(message.src) is not known:
                self.named[message.src] = [*(rank.kv for rank in message.ranks), message.aux]

    def rooms_of_others(self, incarnation: str) -> dict[RoomKey, KVPoll]:
        """Rooms at prefill that another decode worker has, and their states: what this one says must not move them."""
        rooms = self.prefill.rooms
        return {room.key: room.state for room in rooms if room.peer and room.peer.incarnation != incarnation}

    def read_at_decode(self, frame: bytes, link: int) -> None:
        self.steps.append(f"decode reads {frame.hex()} on link {link}")
        with self.reading():
            self.decode.on_message(link, decode(frame), self.now_s)

    @contextlib.contextmanager
    def reading(self) -> Any:
        """As the shell does it: malformed frames and protocol errors are dropped, anything else is a bug."""
        self.num_frames += 1
        with contextlib.suppress(MalformedFrame, PeerProtocolError):
            yield
            self.num_taken += 1

    def call(self, what: str, room: int) -> None:
        """One that the role would not have made is refused, and that is what matters."""
        self.steps.append(f"{what} {room}")
        with contextlib.suppress(RoomInUse, IllegalTransition, KeyError):
            getattr(self, what)(room)

    def open(self, room: int) -> None:
        self.prefill.rooms.open(room, 0, self.now_s)
        self.decode.open(room, 0, BOOTSTRAP, self.now_s)

    def provide(self, room: int) -> None:
        self.decode.rooms.provide(self.decode.rooms[room, 0], TargetPages([1, 2, 3], GIVEN_ROW), self.now_s)

    def land_row(self, row: int, data: bytes) -> None:
        """A row comes into the one place that was given, whole, before its room is Success and while none may move on."""
        assert (row, len(data)) == (GIVEN_ROW, ROW_BYTES), f"{len(data)} bytes for row {row}"
        given = [room for room in self.decode.rooms if room.num_pages is not None]
        assert any(not room.final for room in given), "a row for a room that has ended"

    def send(self, room: int) -> None:
        found = self.prefill.rooms.get((room, 0))
        if found is not None and found.num_pages is not None:
            self.send_all(found)

    def send_all(self, room: PrefillRoom) -> None:
        given = room.num_pages or 0
        if given <= NUM_PAGES:
            self.prefill.rooms.send(room, Chunk(np.arange(given), 0, 0), self.now_s)

    def abort(self, room: int) -> None:
        self.prefill.rooms.abort(self.prefill.rooms[room, 0], "fuzz")
        self.decode.rooms.abort(self.decode.rooms[room, 0], "fuzz", self.now_s)

    def close(self, room: int) -> None:
        sent, received = self.prefill.rooms[room, 0], self.decode.rooms[room, 0]
        if sent.released:
            self.prefill.rooms.close(sent, self.now_s)
        if received.drained:
            self.decode.rooms.close(received)

    def engine(self, room: int) -> None:
        """The oldest operation ends: well, for even rooms."""
        if self.posts:
            self.prefill.completions.on_op_final(self.posts.pop(0), ok=room % 2 == 0, error="fuzz", now_s=self.now_s)

    def take(self, room: int) -> None:
        """The role takes what decode wants computed, opens its rooms and computes."""
        for asked in self.prefill.inbox.take_recompute_requests():
            with contextlib.suppress(RoomInUse, IllegalTransition):
                self.send_all(self.prefill.rooms.open(asked.room, asked.room_attempt, self.now_s))

    def route(self, room: int) -> None:
        self.decode.finder.on_route(BOOTSTRAP, room, Route("127.0.0.1:1", PREFILL, shared=room == 6), self.now_s)

    def drop(self, room: int) -> None:
        self.prefill.on_link_closed(f"link-{room % NUM_LINKS}", self.now_s)
        for link in sorted(self.links)[:1]:
            self.links.discard(link)
            self.decode.on_link_closed(link, self.now_s)

    def tick(self, seconds: float) -> None:
        self.steps.append(f"{seconds} s")
        self.now_s += seconds
        self.prefill.tick(self.now_s)
        self.decode.tick(self.now_s)

    def settle(self) -> None:
        """What shells and engine owe."""
        self.prefill.effects.queue.clear()
        while self.prefill.paths.commands:
            command = self.prefill.paths.commands.popleft()
            if isinstance(command, ConnectPeer):
                self.prefill.admission.on_connected(command.incarnation, self.now_s)
            elif isinstance(command, FencePeer):
                self.prefill.completions.on_fenced(command.incarnation, ok=True, now_s=self.now_s)
        while (post := self.prefill.outbox.next_post(self.now_s)) is not None:
            self.posts.append(post)
            self.num_writes += 1
            self.assert_inside(post)
        while self.decode.effects.queue:
            item = self.decode.effects.queue.popleft()
            if isinstance(item, Connect):
                self.links.add(item.link)

    def assert_inside(self, post: Any) -> None:
        """Every byte of a write lies in memory that this decode worker named, whose items are as long as ours, and no two
        writes of a room overlap; every byte that is read lies in our own pool."""
        same = (r for r in self.named[post.incarnation] if r.item_bytes in (PAGE_BYTES, ROW_BYTES))
        theirs = [(r.base_ptr, r.base_ptr + r.num_items * r.item_bytes) for r in same]
        ours = [(r.base_ptr, r.base_ptr + r.size_bytes) for r in (KV, AUX)]
        for spans, allowed in ((_spans(post, "dst"), theirs), (_spans(post, "src"), ours)):
            for start, stop in spans:
                inside = any(begin <= start and stop <= end <= 2**64 for begin, end in allowed)
                assert inside, f"{start:#x} to {stop:#x} is outside of every region of {post.incarnation}"
        same_place = (post.key, post.pieces.dst_rank)
        others = (other for other in self.posts if (other.key, other.pieces.dst_rank) == same_place)
        written = sorted(span for other in others for span in _spans(other, "dst"))
        assert all(a[1] <= b[0] for a, b in pairwise(written)), f"room {post.key}: two writes to the same bytes"

    def end(self) -> None:
        """The peers are gone, time passes, the roles give up: all of it has to be gone, too."""
        for post in self.posts:
            self.prefill.completions.on_op_final(post, ok=True, error="", now_s=self.now_s)
        self.posts.clear()
        for link in range(NUM_LINKS):
            self.prefill.on_link_closed(f"link-{link}", self.now_s)
        for link in sorted(self.links):
            self.decode.on_link_closed(link, self.now_s)
        for room in range(1, 7):
            self.call("abort", room)
        for _ in range(12):
            self.wind_down()
        assert len(self.prefill.rooms) == len(self.decode.rooms) == 0, "rooms are left"
        assert len(self.prefill.peers) == 0 and len(self.decode.peers) == 0, "peers are left"
        assert len(self.prefill.inbox) == 0 and self.prefill.inbox.num_recompute_requests == 0, "offers are left"
        assert self.decode.rooms.num_exposed == 0 and self.prefill.outbox.num_inflight == 0

    def wind_down(self) -> None:
        self.tick(3.0)
        self.decode.proofs.on_proof(PREFILL, Liveness.DEAD, self.now_s)
        self.settle()
        for asked in self.prefill.inbox.take_recompute_requests():
            with contextlib.suppress(RoomInUse):
                self.prefill.rooms.open(asked.room, asked.room_attempt, self.now_s)
        for link in sorted(self.links):
            self.decode.on_link_closed(link, self.now_s)
        for sent in self.prefill.rooms:
            self.prefill.rooms.abort(sent, "over")
            if sent.released:
                self.prefill.rooms.close(sent, self.now_s)
        for received in self.decode.rooms:
            self.decode.rooms.abort(received, "over", self.now_s)
            if received.drained and not received.closed:
                self.decode.rooms.close(received)


class Frames:
    """Each story at cores of its own."""

    def __init__(self) -> None:
        self.num_inputs = self.num_stories = self.num_taken = self.num_writes = 0

    def run(self, data: bytes) -> None:
        story = Story()
        try:
            story.run(data)
        except BaseException:
            note("\n".join(story.steps))
            raise
        self.num_stories += 1
        self.num_inputs += story.num_frames
        self.num_taken += story.num_taken
        self.num_writes += story.num_writes

    def result(self) -> str:
        taken, writes = self.num_taken, self.num_writes
        return f"{self.num_stories:,} stories; {taken:,} frames were acted on, {writes:,} writes came of them"


def _spans(post: Any, side: str) -> list[tuple[int, int]]:
    starts = getattr(post.pieces, side).tolist()
    return [(start, start + length) for start, length in zip(starts, post.pieces.lengths.tolist(), strict=True)]
