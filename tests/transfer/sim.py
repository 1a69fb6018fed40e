"""A cluster in virtual time: the pure cores of several workers, an engine whose failed writes linger, links that break.

One seed replays one run. The world knows which writes may still land; the cores do not. The first invariant of the
project is checked after every event: no write that may still land goes to a page that decode has given up.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from transfer_backends.contract import Caps, KVArgs, Region, Route, TransferConfig, Work
from transfer_backends.decode.connections import Connect, Disconnect
from transfer_backends.decode.core import DecodeCore
from transfer_backends.decode.lookup import LookUp
from transfer_backends.kvpoll import FINAL, KVPoll, PeerProtocolError, RoomKey
from transfer_backends.liveness import Liveness, ProcessMark
from transfer_backends.prefill.core import PrefillCore
from transfer_backends.prefill.paths import ConnectPeer, DropPeer, FencePeer
from transfer_backends.prefill.posts import Post
from transfer_backends.wire import decode as decode_frame
from transfer_backends.wire import encode

NUM_PAGES = 64
CAPS = Caps(
    name="sim",
    max_inflight=8,
    max_inflight_bytes=1 << 20,
    max_post_pieces=2,
    max_post_bytes=1 << 20,
    max_piece_bytes=2048,
    target_must_poll=False,
    settle_s=0.5,
)
CONFIG = TransferConfig(
    bootstrap_timeout_s=8.0,
    waiting_timeout_s=6.0,
    transfer_timeout_s=4.0,
    handshake_timeout_s=3.0,
    heartbeat_interval_s=0.3,
    drain_timeout_s=5.0,
)
ARGS = KVArgs(Region(1 << 20, NUM_PAGES, 1024), Region(1 << 30, 16, 64), "m", 16, "f32")


@dataclass(eq=False)
class Write:
    """`ends_at_s`: when the engine reports the result. A failed write may still land until a fence or its process's death."""

    post: Post
    ends_at_s: float
    ok: bool
    reported: bool = False


@dataclass
class Prefill:
    name: str
    core: PrefillCore
    writes: list[Write] = field(default_factory=list)
    tasks: list[tuple[float, Any]] = field(default_factory=list)  # connects and fences under way
    senders: dict[RoomKey, int] = field(default_factory=dict)  # pages sent so far
    unreachable: bool = False


@dataclass
class Decode:
    name: str
    core: DecodeCore
    free: list[int] = field(default_factory=lambda: list(range(1, NUM_PAGES)))
    held: dict[RoomKey, list[int]] = field(default_factory=dict)
    live: set[RoomKey] = field(default_factory=set)


@dataclass(eq=False)
class Link:
    prefill: Prefill
    decode: Decode
    number: int
    there: deque[bytes] = field(default_factory=deque)
    back: deque[bytes] = field(default_factory=deque)
    open: bool = True


class World:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now_s = 0.0
        self.faults = True
        self.links: list[Link] = []
        self.half_open: list[tuple[float, Link]] = []
        self.num_lives = 0
        self.next_room = 1
        self.ended = 0
        self.succeeded = 0
        self.recomputed = 0
        self.protocol_errors = 0
        self.lookups: list[tuple[Decode, LookUp]] = []
        self.prefills = [self.new_prefill() for _ in range(2)]
        self.decodes = [self.new_decode(i) for i in range(2)]

    def new_prefill(self) -> Prefill:
        self.num_lives += 1
        name = f"p{self.num_lives}"
        mark = ProcessMark("host", self.num_lives, 1)
        return Prefill(name, PrefillCore(incarnation=name, mark=mark, kv_args=ARGS, caps=CAPS, config=CONFIG))

    def new_decode(self, number: int) -> Decode:
        self.num_lives += 1
        name = f"d{self.num_lives}"
        core = DecodeCore(incarnation=name, kv_args=ARGS, caps=CAPS, descriptor=b"", config=CONFIG)
        return Decode(name, core)

    # ---- one step

    def step(self) -> None:
        self.now_s += self.draw.choice([0.0, 0.001, 0.01, 0.05])
        self.draw.choice(
            [
                self.deliver,
                self.deliver,
                self.deliver,
                self.engines,
                self.engines,
                self.roles,
                self.look_ups,
                self.ticks,
            ]
        )()
        if self.faults and self.draw.random() < 0.004:
            self.draw.choice([self.break_link, self.kill_prefill, self.cut_off])()
        self.flush()
        self.assert_safe()

    def assert_safe(self) -> None:
        """No write that may still land goes to pages that their decode worker has taken back."""
        for prefill in self.prefills:
            for write in prefill.writes:
                decode = next((d for d in self.decodes if d.name == write.post.incarnation), None)
                if decode is not None:
                    assert write.post.key in decode.held, f"{write.post.key}: written after its pages were taken back"
        for worker in (*self.prefills, *self.decodes):
            worker.core.check()

    def flush(self) -> None:
        for prefill in self.prefills:
            outbox = prefill.core.effects.queue
            while outbox:
                link, message = outbox.popleft()
                assert isinstance(link, Link)
                if link.open:
                    link.back.append(encode(message))
        for decode in self.decodes:
            queue = decode.core.effects.queue
            while queue:
                self.do(decode, queue.popleft())

    def do(self, decode: Decode, item: Any) -> None:
        if isinstance(item, tuple):
            for link in self.links:
                if link.decode is decode and link.number == item[0] and link.open:
                    link.there.append(encode(item[1]))
        elif isinstance(item, Connect):
            target = next((p for p in self.prefills if p.name == item.control), None)
            if target is None:
                decode.core.on_link_closed(item.link, self.now_s)
            else:
                self.links.append(Link(target, decode, item.link))
        elif isinstance(item, Disconnect):
            for link in self.links:
                if link.decode is decode and link.number == item.link:
                    self.close_link(link)
        elif isinstance(item, LookUp):
            self.lookups.append((decode, item))
        else:
            alive = any(p.name == item.incarnation for p in self.prefills)
            proof = Liveness.ALIVE if alive else Liveness.DEAD
            if self.draw.random() < 0.3:
                proof = Liveness.UNKNOWN
            decode.core.proofs.on_proof(item.incarnation, proof, self.now_s)

    # ---- what happens in a step

    def deliver(self) -> None:
        links = [link for link in self.links if link.open and not link.prefill.unreachable]
        if links:
            link = self.draw.choice(links)
            for _ in range(self.draw.randint(1, 20)):
                if link.open:
                    self.deliver_one(link)

    def deliver_one(self, link: Link) -> None:
        try:
            if link.there and self.draw.random() < 0.5:
                link.prefill.core.on_message(link, decode_frame(link.there.popleft()), self.now_s)
            elif link.back:
                link.decode.core.on_message(link.number, decode_frame(link.back.popleft()), self.now_s)
        except PeerProtocolError:
            self.protocol_errors += 1

    def engines(self) -> None:
        for prefill in self.prefills:
            self.run_engine(prefill)

    def run_engine(self, prefill: Prefill) -> None:
        core = prefill.core
        while core.paths.commands:
            prefill.tasks.append((self.now_s + self.draw.uniform(0, 0.2), core.paths.commands.popleft()))
        for task in [task for task in prefill.tasks if task[0] <= self.now_s]:
            prefill.tasks.remove(task)
            self.end_task(prefill, task[1])
        post = core.outbox.next_post(self.now_s)
        if post is not None:
            bad = self.faults and self.draw.random() < 0.05
            prefill.writes.append(Write(post, self.now_s + self.draw.choice([0.0, 0.1, 0.3, 1.5]), not bad))
        for write in [w for w in prefill.writes if w.ends_at_s <= self.now_s and not w.reported]:
            write.reported = True
            if write.ok:
                prefill.writes.remove(write)
            core.completions.on_op_final(write.post, ok=write.ok, error="injected", now_s=self.now_s)

    def end_task(self, prefill: Prefill, task: Any) -> None:
        ok = not (self.faults and self.draw.random() < 0.2)
        if isinstance(task, FencePeer):
            self.end_lingering(prefill, task.incarnation)  # a failed fence ends the connection, and its writes with it
            prefill.core.completions.on_fenced(task.incarnation, ok=ok, now_s=self.now_s)
        elif isinstance(task, ConnectPeer) and ok:
            prefill.core.admission.on_connected(task.incarnation)
        elif isinstance(task, ConnectPeer):
            prefill.core.admission.on_connect_failed(task.incarnation, "injected", self.now_s)
        else:
            assert isinstance(task, DropPeer)

    def end_lingering(self, prefill: Prefill, incarnation: str) -> None:
        prefill.writes = [w for w in prefill.writes if not (w.reported and w.post.incarnation == incarnation)]

    def look_ups(self) -> None:
        if not self.lookups:
            return
        decode, item = self.lookups.pop(self.draw.randrange(len(self.lookups)))
        if item.any_but is None:
            owner = next((p for p in self.prefills if (item.room, 0) in p.senders), None)
        else:
            owner = next((p for p in self.prefills if p.name not in item.any_but), None)
        if owner is None:
            decode.core.finder.on_lookup_failed(
                item.bootstrap, item.room, "unknown room", permanent=False, now_s=self.now_s
            )
        else:
            decode.core.finder.on_route(item.bootstrap, item.room, Route(owner.name, owner.name, True), self.now_s)

    def ticks(self) -> None:
        for entry in [entry for entry in self.half_open if entry[0] <= self.now_s]:
            self.half_open.remove(entry)
            if entry[1].prefill in self.prefills:
                entry[1].prefill.core.on_link_closed(entry[1], self.now_s)
        for worker in (*self.prefills, *self.decodes):
            worker.core.tick(self.now_s)

    # ---- roles

    def roles(self) -> None:
        if self.faults and self.draw.random() < 0.5:
            self.begin()
        for prefill in self.prefills:
            for asked in prefill.core.inbox.take_recompute_requests():
                key = prefill.core.rooms.open(asked.room, asked.room_attempt, self.now_s)
                prefill.senders[key] = 0
                self.recomputed += 1
            for key in list(prefill.senders):
                self.prefill_role(prefill, key)
        for decode in self.decodes:
            for key in sorted(decode.live):
                self.decode_role(decode, key)

    def begin(self) -> None:
        key = (self.next_room, 0)
        self.next_room += 1
        prefill, decode = self.draw.choice(self.prefills), self.draw.choice(self.decodes)
        if self.draw.random() < 0.25:  # decode requests it by itself
            key = (key[0], 1)
            decode.core.open(*key, "b", self.now_s)
            decode.live.add(key)
            return
        if self.draw.random() < 0.95:
            prefill.core.rooms.open(*key, self.now_s)
            prefill.senders[key] = 0
        if self.draw.random() < 0.95:
            decode.core.open(*key, "b", self.now_s)
            decode.live.add(key)

    def prefill_role(self, prefill: Prefill, key: RoomKey) -> None:
        core = prefill.core
        state = core.machine.state(key)
        if core.rooms.released(key):
            core.rooms.close(key, self.now_s)
            del prefill.senders[key]
            self.ended += 1
        elif state in FINAL:
            return
        elif self.faults and self.draw.random() < 0.02:
            core.rooms.abort(key, "user")
        elif state is not KVPoll.Bootstrapping and not core.rooms.get(key).all_queued:
            self.send_some(prefill, key)

    def send_some(self, prefill: Prefill, key: RoomKey) -> None:
        total, sent = prefill.core.rooms.num_pages(key), prefill.senders[key]
        assert total is not None
        n = self.draw.randint(0, total - sent)
        src = self.draw.sample(range(NUM_PAGES), n)
        prefill.senders[key] += n
        last = sent + n == total
        metadata_row = 1 if last else None
        prefill.core.rooms.send(key, src, start=sent, last=last, metadata_row=metadata_row, now_s=self.now_s)

    def decode_role(self, decode: Decode, key: RoomKey) -> None:
        core = decode.core
        state = core.machine.state(key)
        if core.rooms.drained(key):
            self.succeeded += state is KVPoll.Success
            core.rooms.close(key)
            decode.live.discard(key)
            decode.free.extend(decode.held.pop(key, []))
            self.ended += 1
        elif state in FINAL:
            return
        elif self.faults and self.draw.random() < 0.02:
            core.rooms.abort(key, "user", self.now_s)
        elif state is KVPoll.WaitingForInput and key not in decode.held and len(decode.free) >= 8:
            n = self.draw.randint(0, 8)
            decode.held[key] = [decode.free.pop() for _ in range(n)]
            core.rooms.provide(key, decode.held[key], 1, self.now_s, Work(tokens=[1]) if key[1] else None)

    # ---- faults

    def close_link(self, link: Link) -> None:
        if link.open:
            link.open = False
            link.there.clear()
            link.back.clear()
            delay_s = self.draw.choice([0.0, 0.1, 3.0])  # a half-open connection: prefill may learn of it much later
            self.half_open.append((self.now_s + delay_s, link))
            link.decode.core.on_link_closed(link.number, self.now_s)

    def break_link(self) -> None:
        links = [link for link in self.links if link.open]
        if links:
            self.close_link(self.draw.choice(links))

    def kill_prefill(self) -> None:
        dead = self.draw.choice(self.prefills)
        self.prefills[self.prefills.index(dead)] = self.new_prefill()
        for link in self.links:
            if link.prefill is dead:
                self.close_link(link)

    def cut_off(self) -> None:
        worker = self.draw.choice(self.prefills)
        worker.unreachable = not worker.unreachable

    def heal(self) -> None:
        self.faults = False
        for prefill in self.prefills:
            prefill.unreachable = False
        self.links = [link for link in self.links if link.open]

    def settled(self) -> bool:
        return not any(p.senders or p.writes for p in self.prefills) and not any(d.live for d in self.decodes)
