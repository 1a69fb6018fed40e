"""The engine that moves bytes, simulated as real ones behave at their worst (how those do: transfer_backends/engines).

A post is many copies that land one by one, each reading its source at that moment. DONE: all have landed. FAILED: some
may still land later, until a fence holds, the connection is cut and has settled, or either process is gone. A write that
lands in a page that decode gave to no transfer, to two, or freed, or reads one that prefill gave up, ends the run.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.simulation.network import Network
from tools.simulation.options import EngineBehaviour
from tools.simulation.workers.ranks import RankView
from tools.simulation.world import Violation, World
from transfer_backends.contract import Caps, EngineError, OpState, Pieces, Region

KV_BASE, AUX_BASE = 1 << 40, 1 << 20
STATE_BASE, WINDOW_BASE = 1 << 30, 1 << 34  # of what a request has beside pages
BASES = {"kv": KV_BASE, "window": WINDOW_BASE, "state": STATE_BASE, "aux": AUX_BASE}  # from the highest
AGAIN_S = 0.25
POLLED_S = 0.5  # what arrives later after the last poll of the target waits for the next one
RESEND_S = 6.0


@dataclass(eq=False)
class Peer:
    target: RankView
    closed: bool = False
    ops: list["Op"] = field(default_factory=list)
    lingering: list["Copy"] = field(default_factory=list)


@dataclass(eq=False)
class Copy:
    """`part`: bytes of the item. `times_free`: how often the source had been free when this was posted."""

    op: "Op"
    kind: str
    src: int
    dst: int
    part: range
    times_free: int
    over: bool = False  # landed or dropped
    lands_at_s: float = 0.0  # not before
    orphaned: bool = False  # its writer, or that one's leader, has died
    blocked_s: float | None = None  # when it first found no way


@dataclass(eq=False)
class Op:
    peer: Peer
    state: OpState = OpState.PENDING
    left: list[Copy] = field(default_factory=list)
    will_fail: bool = False
    posted_s: float = 0.0


def make_caps(draw: random.Random, settle_s: float, *, host_memory: bool, must_poll: bool) -> Caps:
    return Caps(
        name="sim",
        max_inflight=draw.choice([1, 4, 64]),
        max_inflight_bytes=1 << 30,
        max_post_pieces=draw.choice([1, 3, 64]),
        max_post_bytes=1 << 20,
        max_piece_bytes=draw.choice([1, 256, 1 << 20]),
        target_must_poll=must_poll,
        settle_s=settle_s,
        resend_s=RESEND_S,
        carries_host_memory=host_memory,
    )


def descriptor_of(name: str) -> bytes:
    """Of the engine of process `name`."""
    return f"sim:{name}".encode()


@dataclass(eq=False, kw_only=True)
class SimEngine:
    """Implements transfer_backends.ports.Engine for one rank of a worker's life. `on_progress`: an operation may be final.

    `label`: tells it from the other engine of its process.
    """

    world: World
    network: Network
    memory: RankView
    caps: Caps
    behaviour: EngineBehaviour
    directory: dict[bytes, RankView]
    on_progress: Any
    label: str = ""
    faulty: bool = True

    def __post_init__(self) -> None:
        self._name = self.memory.process.name + self.label
        self._draw = self.world.rng(f"engine/{self._name}")
        self._process = self.memory.process
        self._died_s = 0.0
        self._process.on_death.append(self._note_death)

    # ---- the contract

    def register(self, regions: Sequence[Region]) -> None:
        self.directory[self.descriptor()] = self.memory

    def descriptor(self) -> bytes:
        return descriptor_of(self._name)

    def connect(self, incarnation: str, descriptor: bytes) -> Peer:
        self._check_alive()
        target = self.directory.get(bytes(descriptor))
        if target is None:
            raise EngineError("not a descriptor of this engine")
        if not target.process.alive or self._hit("transfer connect error", self.behaviour.connect_fail_rate):
            raise EngineError("cannot connect")
        return Peer(target)

    def disconnect(self, peer: Peer) -> None:
        assert not any(op.state is OpState.PENDING for op in peer.ops), "disconnected with operations pending"
        peer.closed = True
        for copy in list(peer.lingering):  # what is in socket buffers may still be applied for a while
            if self._draw.random() < 0.5:
                self._drop(copy)
            else:
                copy.lands_at_s = 0.0
                self._land_in(self._draw.uniform(0, 0.9 * self.caps.settle_s), copy)
        peer.lingering = []

    def post(self, peer: Peer, pieces: Pieces) -> Op:
        self._check_alive()
        if peer.closed:
            raise EngineError("the connection is closed")
        op = Op(peer, posted_s=self.world.now_s)
        op.will_fail = self._hit("transfer error", self.behaviour.fail_rate)
        op.left = [copy for i in range(len(pieces)) for copy in self._copies(op, pieces, i)]
        peer.ops = [other for other in peer.ops if other.state is OpState.PENDING] + [op]
        slow_s = self.behaviour.slow_s if self._hit("slow transfer", self.behaviour.slow_rate) else 0.0
        low, high = self.behaviour.copy_s
        for copy in list(op.left):
            self._land_in(self._draw.uniform(low, high) * len(op.left) + self._draw.uniform(0, slow_s), copy)
        if op.will_fail:
            self._after(self._draw.uniform(0, high * len(op.left) + slow_s), "op fails", self._fail, op)
        return op

    def probe(self, peer: Peer) -> Op:
        return self._signal(peer, "probe", fails=not peer.target.process.alive)

    def trial(self, peer: Peer) -> None:
        """Rates are no part of a run."""

    def fence(self, peer: Peer) -> Op:
        assert not any(op.state is OpState.PENDING for op in peer.ops), "fenced with operations pending"
        fails = self._hit("fence error", self.behaviour.fence_fail_rate) or not peer.target.process.alive
        return self._signal(peer, "fence", fails=fails, delay_s=self._draw.uniform(0, self.behaviour.fence_s))

    def poll(self, op: Op) -> OpState:
        """A dead process never says that its writes have landed."""
        if op.state is OpState.PENDING and not self._process.alive:
            op.state = OpState.FAILED
        return op.state

    def progress(self, *, eager: bool = False) -> None:
        self.memory.polled_s = self.world.now_s

    def close(self) -> None:
        """Nothing to end."""

    # ---- inside

    def _check_alive(self) -> None:
        """A living leader asks the engine of a rank that has died, as engines/remote.py."""
        if not self._process.alive:
            raise EngineError(f"{self._name}: its transfer engine is lost")

    def _hit(self, kind: str, rate: float) -> bool:
        hit = self.faulty and self._draw.random() < rate
        self.world.injected[kind] += hit
        return hit

    def _after(self, delay_s: float, label: str, act: Any, *args: Any) -> None:
        self.world.after(delay_s, f"{self._process.name} {label}", act, *args)

    def _signal(self, peer: Peer, label: str, *, fails: bool, delay_s: float = 0.0) -> Op:
        self._check_alive()
        op = Op(peer, will_fail=fails, posted_s=self.world.now_s)
        peer.ops.append(op)
        delay_s += self._draw.uniform(*self.behaviour.copy_s)
        self._after(delay_s, label, self._end_signal, op, label)
        return op

    def _end_signal(self, op: Op, label: str) -> None:
        if not self._way_is_free(op):
            if self.world.now_s - op.posted_s > self.behaviour.gives_up_s:
                self._end(op, OpState.FAILED)
            else:
                self._after(AGAIN_S, f"{label} again", self._end_signal, op, label)
            return
        if op.will_fail or not op.peer.target.process.alive:
            self._end(op, OpState.FAILED)
            return
        if label == "fence":  # only now nothing earlier can write any more
            self.world.seen["late writes that a fence ends"] += len(op.peer.lingering)
            for copy in list(op.peer.lingering):
                self._drop(copy)
        self._end(op, OpState.DONE)

    def _way_is_free(self, op: Op) -> bool:
        return (self._process.node, op.peer.target.process.node) not in self.network.blocked

    def _copies(self, op: Op, pieces: Pieces, i: int) -> list[Copy]:
        src, dst, length = int(pieces.src[i]), int(pieces.dst[i]), int(pieces.lengths[i])
        kind = next(kind for kind, base in BASES.items() if src >= base)
        if kind == "aux" and not self.caps.carries_host_memory:
            raise Violation(f"{self._process.name} writes host memory")
        mine, theirs = (m.region(kind) for m in (self.memory, op.peer.target))
        size = mine.item_bytes
        (first, begin), (target, there) = divmod(src - mine.base_ptr, size), divmod(dst - theirs.base_ptr, size)
        if not (target >= 0 and dst + length <= theirs.base_ptr + theirs.size_bytes):
            raise Violation(f"{self._process.name} writes outside {op.peer.target.process.name}'s {kind} pool")
        if begin != there or (length % size and begin + length > size):
            raise Violation(f"{self._process.name} writes {length} bytes from byte {begin} of an item to byte {there}")
        part = range(begin, begin + min(length, size))
        sources = range(first, first + max(1, length // size))
        return [
            Copy(op, kind, src, target + k, part, self.memory.times_free(kind, src)) for k, src in enumerate(sources)
        ]

    def _land_in(self, delay_s: float, copy: Copy) -> None:
        self._after(delay_s, "write", self._land, copy)

    def _land(self, copy: Copy) -> None:
        op, target = copy.op, copy.op.peer.target
        if copy.over or self.world.now_s < copy.lands_at_s:
            return
        if not target.process.alive:
            self._drop(copy)
            self._fail(op)
            return
        if not self._process.alive and not copy.orphaned:
            self._outlive(copy)
            return
        if self._process.alive and self.memory.ends_s is not None and not copy.orphaned:
            copy.orphaned = True  # it goes on at any time until its process ends
            self._land_in(self._draw.uniform(0, max(0.0, self.memory.ends_s - self.world.now_s)), copy)
            return
        if not self._way_is_free(op):
            if self._process.alive and self.world.now_s - op.posted_s > self.behaviour.gives_up_s:
                self._fail(op)
            self._send_again(copy)
            return
        if self.caps.target_must_poll and self.world.now_s - target.polled_s > POLLED_S:
            self._land_in(AGAIN_S, copy)
            return
        self._write(copy, target)

    def _send_again(self, copy: Copy) -> None:
        """As TCP: the wait grows with the outage (RFC 6298, 5.5), and a closed connection ends after `caps.resend_s`."""
        if copy.over:
            return
        if copy.blocked_s is None:
            copy.blocked_s = self.world.now_s
        blocked_s = self.world.now_s - copy.blocked_s
        closed = not self._process.alive or copy.op.state is not OpState.PENDING
        if closed and blocked_s > 0.9 * self.caps.resend_s:
            self._drop(copy)
        else:
            self._land_in(AGAIN_S + self._draw.uniform(0, 0.9 * blocked_s), copy)

    def _outlive(self, copy: Copy) -> None:
        """Of a dead writer's bytes only those arrive that were in the network, and soon: within `caps.settle_s`."""
        left_s = self._died_s + 0.9 * self.caps.settle_s - self.world.now_s
        if left_s <= 0 or self._draw.random() < 0.3:
            self._drop(copy)
        else:
            copy.orphaned = True
            self._land_in(self._draw.uniform(0, left_s), copy)

    def _note_death(self) -> None:
        self._died_s = self.world.now_s

    def _write(self, copy: Copy, target: RankView) -> None:
        op = copy.op
        what = f"{copy.kind} {copy.src} of {self._process.name} to {copy.dst} of {target.process.name}"
        if not target.write_allowed(copy.kind, copy.dst):
            raise Violation(f"a write lands in memory that moved on: {what} (operation {op.state.name})")
        kept = self.memory.times_free(copy.kind, copy.src) == copy.times_free
        kept = kept and self.memory.read_allowed(copy.kind, copy.src)
        if self._process.alive and op.state is OpState.PENDING and not kept:
            raise Violation(f"a write reads memory that prefill gave up: {what}")
        target.copy_from(self.memory, copy.kind, copy.src, copy.dst, copy.part)
        if copy.kind == "kv" and self._hit("damaged page", self.behaviour.flip_rate):
            target.damage(copy.dst, self._draw.randrange(target.page_size))
        self.world.seen["late writes" if op.state is OpState.FAILED else "writes"] += 1
        self.world.seen["writes of followers without a leader"] += self.memory.ends_s is not None
        self._drop(copy)
        if op.state is OpState.PENDING and not op.left and not op.will_fail:
            late_s = self._draw.uniform(0, 2.0) if self._hit("late completion", self.behaviour.late_done_rate) else 0.0
            self._after(late_s, "op done", self._end, op, OpState.DONE)

    def _drop(self, copy: Copy) -> None:
        copy.over = True
        if copy in copy.op.left:
            copy.op.left.remove(copy)
        if copy in copy.op.peer.lingering:
            copy.op.peer.lingering.remove(copy)

    def _fail(self, op: Op) -> None:
        """The engine reports an error. What is on its way may still arrive, or not."""
        if op.state is not OpState.PENDING:
            return
        for copy in list(op.left):
            if self.faulty and self._draw.random() < self.behaviour.late_rate:
                self.world.injected["write after the failure"] += 1
                op.peer.lingering.append(copy)
                linger_s = self._draw.uniform(0, self.behaviour.max_linger_s)
                copy.lands_at_s = self.world.now_s + linger_s if self.behaviour.stays_late else 0.0
                self._land_in(linger_s, copy)
            else:
                self._drop(copy)
        self._end(op, OpState.FAILED)

    def _end(self, op: Op, state: OpState) -> None:
        op.state = state if self._process.alive else OpState.FAILED
        self.on_progress()
