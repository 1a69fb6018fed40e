"""Fuzzed frames at both ends of the control plane: the production codec and cores, driven by hypothesis.

An input is one frame. An example is a short story of frames, local calls and time at a fresh pair of cores; after it the
peers vanish and time passes, and nothing may be left: no room, peer, session, offer or unbounded table.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import strategies as st

from transfer_backends.contract import Caps, KVArgs, Region, Route, TransferConfig
from transfer_backends.decode_rooms import DecodeRooms
from transfer_backends.decode_sessions import Connect, LookUp
from transfer_backends.kvpoll import FINAL, IllegalTransition, PeerProtocolError, RoomInUse
from transfer_backends.liveness import Liveness, ProcessMark
from transfer_backends.prefill_peers import ConnectPeer, FencePeer
from transfer_backends.prefill_rooms import PrefillRooms
from transfer_backends.wire import (
    PROTOCOL_VERSION,
    Layout,
    MalformedFrame,
    Message,
    Register,
    WireRegion,
    decode,
)

NUM_PAGES, NUM_ROWS, PAGE_BYTES, ROW_BYTES = 32, 8, 1024, 64
KV, AUX = Region(1 << 40, NUM_PAGES, PAGE_BYTES), Region(1 << 41, NUM_ROWS, ROW_BYTES)
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
)
CONFIG = TransferConfig(
    bootstrap_timeout_s=5.0,
    waiting_timeout_s=5.0,
    transfer_timeout_s=5.0,
    handshake_timeout_s=2.0,
    drain_timeout_s=5.0,
    max_peers=4,
    max_orphans=16,
    max_tombstones=32,
)
PREFILL, DECODE = "prefill-life", "decode-life"
BOOTSTRAP = "127.0.0.1:8998"
NAMES = st.sampled_from([PREFILL, DECODE, "", "stranger", "x" * 256, "é"])
ROOMS = st.one_of(st.integers(1, 6), st.sampled_from([2**63 - 1, 0, -1, 2**64 - 1]))
COUNTS = st.one_of(st.integers(0, 40), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64 - 1, -1]))
PAGES = st.one_of(
    st.lists(st.integers(-1, NUM_PAGES + 1), max_size=8).map(
        lambda ids: b"".join(i.to_bytes(4, "little", signed=True) for i in ids)
    ),
    st.lists(st.integers(0, NUM_PAGES - 1), max_size=6, unique=True).map(
        lambda ids: b"".join(i.to_bytes(4, "little") for i in ids)
    ),
    st.lists(st.sampled_from([0, NUM_PAGES - 1, NUM_PAGES, 2**31 - 1]), max_size=3, unique=True).map(
        lambda ids: b"".join(i.to_bytes(4, "little") for i in ids)
    ),
    st.binary(max_size=20),
)
LAYOUT = Layout(PROTOCOL_VERSION, "fuzz", "m", 16, "f32")
LAYOUTS = st.sampled_from(
    [LAYOUT, LAYOUT, LAYOUT, Layout(0, "fuzz", "m", 16, "f32"), Layout(PROTOCOL_VERSION, "?", "", 0, "")]
)
REGIONS = st.sampled_from(
    [
        WireRegion(KV.base_ptr, NUM_PAGES, PAGE_BYTES, None),
        WireRegion(AUX.base_ptr, NUM_ROWS, ROW_BYTES, None),
        WireRegion(2**63 - 1, 2**62, PAGE_BYTES, None),
        WireRegion(0, 0, 0, 7),
    ]
)
REASONS = st.sampled_from(["", "because", "x" * 2048, "\x00\n", "é"])
ATTEMPTS = st.sampled_from([0, 0, 0, 1, 2**31 - 1, 2**31])
STATES = st.integers(-1, 5)


def _tagged(name: str, *values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """A message as its array, so that values which no struct would take can be sent, too."""
    return st.tuples(*values).map(lambda got: [name, *(msgspec.to_builtins(v, builtin_types=(bytes,)) for v in got)])


SOUND = st.one_of(
    _tagged("Register", NAMES, NAMES, LAYOUTS, REGIONS, REGIONS, st.binary(max_size=8)),
    _tagged(
        "Register",
        st.just(DECODE),
        st.just(PREFILL),
        st.just(LAYOUT),
        st.just(WireRegion(KV.base_ptr, NUM_PAGES, PAGE_BYTES, None)),
        st.just(WireRegion(AUX.base_ptr, NUM_ROWS, ROW_BYTES, None)),
        st.just(b"d"),
    ),
    _tagged("TransferInfo", NAMES, NAMES, ROOMS, ATTEMPTS, PAGES, COUNTS),
    _tagged(
        "TransferInfo",
        st.just(DECODE),
        st.just(PREFILL),
        st.integers(1, 6),
        st.just(0),
        PAGES,
        st.integers(0, NUM_ROWS),
    ),
    _tagged("Recompute", NAMES, NAMES, ROOMS, ATTEMPTS, PAGES, COUNTS, PAGES, COUNTS, COUNTS, st.booleans()),
    _tagged(
        "Recompute",
        st.just(DECODE),
        st.just(PREFILL),
        st.integers(1, 6),
        st.integers(1, 2),
        PAGES,
        st.integers(0, NUM_ROWS),
        PAGES,
        st.integers(0, 3),
        st.just(0),
        st.booleans(),
    ),
    _tagged("Abort", NAMES, NAMES, ROOMS, ATTEMPTS, REASONS),
    _tagged("Status", NAMES, NAMES, ROOMS, ATTEMPTS, STATES, COUNTS, REASONS),
    _tagged(
        "Status", st.just(PREFILL), st.just(DECODE), st.integers(1, 6), st.just(0), STATES, st.integers(0, 6), REASONS
    ),
    _tagged("Drained", NAMES, NAMES, ROOMS, ATTEMPTS),
    _tagged("Registered", NAMES, NAMES, st.just(ProcessMark("h", 1, 1))),
    _tagged("Refused", NAMES, NAMES, REASONS, st.booleans()),
    _tagged("Ping", NAMES, NAMES, COUNTS),
    _tagged("Pong", NAMES, NAMES, COUNTS),
    _tagged("Bye", NAMES, NAMES),
).map(msgspec.msgpack.encode)
JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.text(max_size=8),
        st.binary(max_size=8),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=10,
).map(msgspec.msgpack.encode)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A sound frame with bytes changed, cut off or added."""
    frame = bytearray(draw(SOUND))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        act = draw(st.integers(0, 2))
        if act == 0 and frame:
            frame[at] ^= draw(st.integers(1, 255))
        elif act == 1:
            del frame[at:]
        else:
            frame[at:at] = draw(st.binary(max_size=4))
    return bytes(frame)


FRAMES = st.one_of(SOUND, SOUND, SOUND, mutated(), JUNK, st.binary(max_size=64))
CALLS = st.sampled_from(["open", "send", "abort", "close", "provide", "engine", "route", "drop", "take"])
STEPS = st.one_of(
    st.tuples(st.just("to-prefill"), FRAMES, st.integers(0, 2)),
    st.tuples(st.just("to-decode"), FRAMES, st.integers(0, 2)),
    st.tuples(st.just("offer"), PAGES, st.integers(1, 3)),
    st.tuples(st.just("call"), CALLS, st.integers(1, 6)),
    st.tuples(st.just("time"), st.sampled_from([0.0, 0.1, 1.0, 3.0]), st.just(0)),
)
STORIES = st.lists(STEPS, min_size=10, max_size=60)

Steps = list[tuple[str, Any, int]]


@dataclass
class Story:
    """Both cores, one decode worker registered, three rooms open.

    `num_frames` were read, `num_taken` of them were messages that changed something or were answered, `num_writes` led to
    an operation of the engine.
    """

    now_s: float = 0.0
    num_frames: int = 0
    num_taken: int = 0
    num_writes: int = 0
    posts: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        mark = ProcessMark("h", 1, 1)
        self.prefill = PrefillRooms(incarnation=PREFILL, mark=mark, kv_args=ARGS, caps=CAPS, config=CONFIG)
        self.decode = DecodeRooms(incarnation=DECODE, kv_args=ARGS, caps=CAPS, descriptor=b"d", config=CONFIG)
        self.links: set[int] = set()
        region = (
            WireRegion(KV.base_ptr, NUM_PAGES, PAGE_BYTES, None),
            WireRegion(AUX.base_ptr, NUM_ROWS, ROW_BYTES, None),
        )
        self.prefill.on_message("link-0", Register(DECODE, PREFILL, LAYOUT, *region, b"d"), self.now_s)
        self.settle()
        for room in (1, 2, 3):
            self.open(room)

    def run(self, steps: Steps) -> None:
        for kind, what, number in steps:
            if kind == "call":
                self.call(what, number)
            elif kind == "offer":  # pages, wherever they are, and at once the bytes for them
                self.read(
                    "to-prefill", msgspec.msgpack.encode(["TransferInfo", DECODE, PREFILL, number, 0, what, 0]), 0
                )
                self.call("send", number)
            elif kind == "time":
                self.tick(what)
            else:
                self.read(kind, what, number)
            self.settle()
            problems = self.prefill.check() + self.decode.check()
            assert not problems, problems
        self.end()

    def read(self, kind: str, frame: bytes, link: int) -> None:
        """As the shell does it: malformed frames and protocol errors are dropped, anything else is a bug."""
        self.num_frames += 1
        try:
            message: Message = decode(frame)
            if kind == "to-prefill":
                self.prefill.on_message(f"link-{link}", message, self.now_s)
            else:
                self.decode.on_message(link, message, self.now_s)
            self.num_taken += 1
        except (MalformedFrame, PeerProtocolError):
            pass

    def call(self, what: str, room: int) -> None:
        """One that the role would not have made is refused, and that is what matters."""
        with contextlib.suppress(RoomInUse, IllegalTransition, KeyError):
            getattr(self, what)(room)

    def open(self, room: int) -> None:
        self.prefill.open(room, 0, self.now_s)
        self.decode.open(room, 0, BOOTSTRAP, self.now_s)

    def provide(self, room: int) -> None:
        self.decode.provide((room, 0), [1, 2, 3], 0, self.now_s)

    def send(self, room: int) -> None:
        given = self.prefill.num_pages((room, 0))
        if given is not None and given <= NUM_PAGES:
            self.prefill.send((room, 0), range(given), dst_start=0, last=True, aux_idx=0, now_s=self.now_s)

    def abort(self, room: int) -> None:
        self.prefill.abort((room, 0), "fuzz")
        self.decode.abort((room, 0), "fuzz", self.now_s)

    def close(self, room: int) -> None:
        if self.prefill.released((room, 0)):
            self.prefill.close((room, 0), self.now_s)
        if self.decode.drained((room, 0)):
            self.decode.close((room, 0))

    def engine(self, room: int) -> None:
        """The oldest operation ends: well, for even rooms."""
        if self.posts:
            self.prefill.on_op_final(self.posts.pop(0), ok=room % 2 == 0, error="fuzz", now_s=self.now_s)

    def take(self, room: int) -> None:
        """The role takes what decode wants computed, and opens its rooms."""
        for asked in self.prefill.take_asked():
            with contextlib.suppress(RoomInUse):
                self.prefill.open(asked.room, asked.attempt, self.now_s)

    def route(self, room: int) -> None:
        self.decode.on_route(BOOTSTRAP, room, Route("127.0.0.1:1", PREFILL, shared=room == 6), self.now_s)

    def drop(self, room: int) -> None:
        self.prefill.on_link_closed(f"link-{room % 3}", self.now_s)
        for link in sorted(self.links)[:1]:
            self.links.discard(link)
            self.decode.on_link_closed(link, self.now_s)

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.prefill.tick(self.now_s)
        self.decode.tick(self.now_s)

    def settle(self) -> None:
        """What shells and engine owe; every address of a write is inside the memory that decode registered."""
        self.prefill.effects.outbox.clear()
        while self.prefill.effects.commands:
            command = self.prefill.effects.commands.popleft()
            if isinstance(command, ConnectPeer):
                self.prefill.peers.on_connected(command.incarnation)
            elif isinstance(command, FencePeer):
                self.prefill.on_fenced(command.incarnation, ok=True, now_s=self.now_s)
        while (post := self.prefill.next_post(self.now_s)) is not None:
            self.posts.append(post)
            self.num_writes += 1
            for start, length in zip(post.pieces.dst.tolist(), post.pieces.lengths.tolist(), strict=True):
                inside = [r for r in (KV, AUX) if r.base_ptr <= start and start + length <= r.base_ptr + r.size_bytes]
                assert inside, f"a write of {length} bytes to {start:#x}, outside of every region"
        while self.decode.effects.queue:
            item = self.decode.effects.queue.popleft()
            if isinstance(item, Connect):
                self.links.add(item.link)
            elif isinstance(item, LookUp):
                continue

    def end(self) -> None:
        """The peers are gone, time passes, the roles give up: all of it has to be gone, too."""
        for post in self.posts:
            self.prefill.on_op_final(post, ok=True, error="", now_s=self.now_s)
        self.posts.clear()
        for link in range(3):
            self.prefill.on_link_closed(f"link-{link}", self.now_s)
        for link in sorted(self.links):
            self.decode.on_link_closed(link, self.now_s)
        for room in range(1, 7):
            self.call("abort", room)
        for _ in range(12):
            self.tick(3.0)
            self.decode.on_proof(PREFILL, Liveness.DEAD, self.now_s)
            self.settle()
            self.take(0)
            for link in sorted(self.links):
                self.decode.on_link_closed(link, self.now_s)
            for key in list(self.prefill.machine):
                self._give_up(self.prefill, key)
            for key in list(self.decode.machine):
                self._give_up(self.decode, key)
        assert not list(self.prefill.machine) and not list(self.decode.machine), "rooms are left"
        assert len(self.prefill.peers) == 0 and len(self.decode.sessions) == 0, "peers are left"
        assert len(self.prefill._inbox) == 0, "offers are left"
        assert self.decode.num_exposed == 0 and self.prefill.num_inflight == 0

    def _give_up(self, side: Any, key: tuple[int, int]) -> None:
        is_prefill = side is self.prefill
        if side.machine.state(key) not in FINAL:
            side.abort(key, "over") if is_prefill else side.abort(key, "over", self.now_s)
        if is_prefill and side.released(key):
            side.close(key, self.now_s)
        elif not is_prefill and side.drained(key) and not side._rooms[key].closed:
            side.close(key)
