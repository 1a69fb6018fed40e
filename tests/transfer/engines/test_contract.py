"""One suite over every engine: two real processes, real bytes, and every way a transfer can end.

The prefill manager lives here; decode workers are child processes with their own memory (and the other way round where
prefill has to die).
"""

import hashlib
import itertools
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.cells import some
from tests.transfer import rig
from tests.transfer.pool import Pool
from tests.transfer.rig import ChildWorker, until
from tests.transfer.ways import ROWS, engine_of, moves_pages, moves_rows
from transfer_backends.contract import (
    NOTHING_YET,
    Gate,
    LayerGroup,
    Progress,
    Route,
    SourcePages,
    TargetPages,
    TransferConfig,
)
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.ports import KVSender
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.sides import KVPoll

NUM_PAGES, PAGE_BYTES = 1024, 32768
CONFIG = {"heartbeat_interval_s": 0.2, "heartbeat_max_failures": 3, "handshake_timeout_s": 5.0}
# Mooncake's engine over NVLink carries no host memory; here its TCP plays that.
# Rows over the control plane, by pure cores: tests/transfer/test_rows_by_message.py.
WAYS = some(("nixl", "mooncake", "fake", f"fake{ROWS}", f"mooncake{ROWS}"), tried=("nixl", "mooncake", "fake"))
# The fake engine takes its time, so that an abort can hit a transfer under way.
FAKE = {"fake_delay_s": 0.02}
GROUPS = (LayerGroup(2, 8192), LayerGroup(3, 12288), LayerGroup(6, PAGE_BYTES))


class HandClock:
    """A `LayerClock` that the test sets."""

    ticking = False

    def __init__(self) -> None:
        self.now = NOTHING_YET

    def progress(self) -> Progress:
        return self.now


class Mappings:
    """An engine that counts whose memory it maps: what it connects to, until it lets go."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.of: Counter[str] = Counter()  # by incarnation
        self._peers: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def connect(self, incarnation: str, descriptor: bytes) -> Any:
        peer = self._engine.connect(incarnation, descriptor)
        self.of[incarnation] += 1
        self._peers[id(peer)] = incarnation
        return peer

    def disconnect(self, peer: Any) -> None:
        self.of[self._peers.pop(id(peer))] -= 1
        self._engine.disconnect(peer)


class Prefill:
    """A prefill worker in this process."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.pool = Pool(num_pages=NUM_PAGES, page_bytes=PAGE_BYTES, seed=1)
        self.clock = HandClock()
        args = replace(self.pool.args, groups=GROUPS)
        self.mappings = Mappings(engine_of(backend, **FAKE))
        self.manager = PrefillManager(args, self.mappings, TransferConfig(**CONFIG), layers=self.clock)
        self.manager.start()
        self.rooms = iter(range(1, 1 << 40))

    def decode(self, **pool: Any) -> ChildWorker:
        spec = {"num_pages": NUM_PAGES, "page_bytes": PAGE_BYTES, "seed": None, **pool}
        child = ChildWorker(role="decode", backend=self.backend, pool=spec, config=CONFIG, engine=FAKE)
        child.route("b", self.manager.control_address, self.manager.incarnation)
        return child


@pytest.fixture(scope="module", params=WAYS)
def prefill(request: pytest.FixtureRequest) -> Iterator[Prefill]:
    worker = Prefill(request.param)
    yield worker
    worker.manager.check()
    assert worker.manager.counters["rooms"] == 0
    worker.manager.close()
    assert worker.mappings.of and not any(worker.mappings.of.values()), "memory of peers is mapped by a closed manager"


@pytest.fixture(scope="module")
def decode(prefill: Prefill) -> Iterator[ChildWorker]:
    with prefill.decode() as child:
        yield child
        child.check()
        assert child.counters()["rooms"] == child.counters()["exposed_rooms"] == 0


def meet(prefill: Prefill, decode: ChildWorker, pages: list[int], metadata_row: int = 0) -> tuple[int, KVSender]:
    """A room whose prefill side has decode's indices."""
    room = next(prefill.rooms)
    sender = prefill.manager.sender(room)
    decode.receiver(room, "b")
    until(lambda: decode.poll(room) is KVPoll.WaitingForInput, what="handshake")
    decode.provide(room, pages, metadata_row)
    until(lambda: sender.poll() is KVPoll.WaitingForInput, what="indices")
    assert sender.num_pages == len(pages)
    return room, sender


def finish(decode: ChildWorker, room: int, sender: KVSender) -> None:
    """Both ends safe, both rooms forgotten."""
    until(lambda: sender.released() and decode.state(room)[2], what="released and drained")
    sender.close()
    decode.close(room)


def test_bytes_are_exact(prefill: Prefill, decode: ChildWorker) -> None:
    draw = random.Random(3)
    for size in (0, 1, 2, 17, 200, 700):  # without pages there is the metadata row
        decode.wipe()
        src, dst = draw.sample(range(NUM_PAGES), size), draw.sample(range(NUM_PAGES), size)
        if size == 200:  # runs that merge
            src, dst = list(range(100, 300)), [*range(500, 600), *range(300, 400)]
        room, sender = meet(prefill, decode, dst, metadata_row=5)
        cuts = [0, *sorted(draw.sample(range(size), min(3, max(size - 1, 0)))), size]
        for start, end in itertools.pairwise(cuts):
            sender.send(SourcePages(src[start:end], start=start, metadata_row=7 if end == size else None))
        until(lambda s=sender: s.poll() is KVPoll.Success)
        until(lambda r=room: decode.poll(r) is KVPoll.Success)
        if moves_pages(prefill.backend):
            assert decode.pages(dst) == prefill.pool.pages(src)
            assert decode.others(dst) == []
        if moves_rows(prefill.backend):
            assert decode.rows([5]) == prefill.pool.rows([7])
            assert decode.rows([4, 6]) == hashlib.sha256(b"\xa5" * 1024).hexdigest()
        finish(decode, room, sender)


def test_the_way_to_a_peer_is_known_and_measured(prefill: Prefill, decode: ChildWorker) -> None:
    finish_at_once(prefill, decode)
    if not moves_pages(prefill.backend):
        assert prefill.manager.paths == []  # it has none
        return
    (path,) = prefill.manager.paths
    assert path.address == "127.0.0.1" and path.near and path.bytes_a_s > 0
    assert (
        path.transport
        in {"nixl": ("cma", "tcp", "unknown"), "mooncake": ("tcp", "unknown")}[prefill.backend.removesuffix(ROWS)]
    )
    with prefill.decode() as another:
        finish_at_once(prefill, another)
        assert len(prefill.manager.paths) == 2 and prefill.manager.paths[0] == path
    until(lambda: prefill.manager.paths == [path], what="the worker that left is forgotten")


def finish_at_once(prefill: Prefill, decode: ChildWorker) -> None:
    """A transfer of one page succeeds."""
    room, sender = meet(prefill, decode, [3])
    sender.send(SourcePages([7], metadata_row=0))
    until(lambda: decode.poll(room) is KVPoll.Success)
    finish(decode, room, sender)


def test_layers_leave_when_they_are_written(prefill: Prefill, decode: ChildWorker) -> None:
    """Pages 0..2 are complete when step 3 begins, the others when it has written their layers; twice, as of two chunks."""
    draw, clock = random.Random(5), prefill.clock
    decode.wipe()
    src, dst = draw.sample(range(NUM_PAGES), 40), draw.sample(range(NUM_PAGES), 40)
    room, sender = meet(prefill, decode, dst, metadata_row=5)
    right, posts = prefill.pool.pages(src), prefill.manager.counters.get("posts", 0)
    for step, first, end in ((3, 0, 20), (4, 20, 40)):
        written = prefill.pool.kv[src[first + 3 : end]].copy()
        prefill.pool.kv[src[first + 3 : end]] = 0
        sender.send(SourcePages(src[first : first + 3], start=first, gate=Gate(step, by_layer=False)))
        sender.send(SourcePages(src[first + 3 : end], start=first + 3, gate=Gate(step, by_layer=True)))
        begin = 0
        for layers, end_byte in ((0, 0), *((group.end_layer, group.end_byte) for group in GROUPS)):
            prefill.pool.kv[src[first + 3 : end], begin:end_byte] = written[:, begin:end_byte]
            begin, posts = end_byte, posts + 1
            clock.now = Progress(step, layers)
            prefill.manager.on_mark()
            until(lambda: prefill.manager.counters.get("posts", 0) == posts, what=f"step {step}, {layers} layers")  # noqa: B023
    assert sender.poll() is KVPoll.Transferring and decode.poll(room) is not KVPoll.Success
    sender.send(SourcePages([], start=40, metadata_row=7))
    until(lambda: sender.poll() is decode.poll(room) is KVPoll.Success)
    if moves_pages(prefill.backend):
        assert decode.pages(dst) == right == prefill.pool.pages(src)
        assert decode.others(dst) == []
    if moves_rows(prefill.backend):
        assert decode.rows([5]) == prefill.pool.rows([7])
    finish(decode, room, sender)


def test_an_abort_while_layers_are_awaited_drains_at_once(prefill: Prefill, decode: ChildWorker) -> None:
    room, sender = meet(prefill, decode, [1, 2, 3])
    sender.send(SourcePages([4, 5, 6], gate=Gate(prefill.clock.now.step + 1, by_layer=True)))
    decode.abort(room, "the user left")
    until(lambda: sender.poll() is KVPoll.Failed)
    assert sender.released()  # nothing was posted, nothing will be
    finish(decode, room, sender)
    clock = prefill.clock
    clock.now = Progress(clock.now.step + 1, GROUPS[-1].end_layer)
    prefill.manager.wake_sender()


def test_concurrent_rooms(prefill: Prefill, decode: ChildWorker) -> None:
    decode.wipe()
    draw = random.Random(4)
    all_dst = draw.sample(range(NUM_PAGES), 16 * 60)
    dst = [all_dst[60 * i : 60 * (i + 1)] for i in range(16)]
    src = [draw.sample(range(NUM_PAGES), 60) for _ in range(16)]
    rooms = [meet(prefill, decode, pages, metadata_row=i) for i, pages in enumerate(dst)]
    for start in (0, 20, 40):
        for i, (_, sender) in enumerate(rooms):
            last = start == 40
            sender.send(SourcePages(src[i][start : start + 20], start=start, metadata_row=i if last else None))
    for i, (room, sender) in enumerate(rooms):
        until(lambda r=room: decode.poll(r) is KVPoll.Success)
        if moves_pages(prefill.backend):
            assert decode.pages(dst[i]) == prefill.pool.pages(src[i])
        if moves_rows(prefill.backend):
            assert decode.rows([i]) == prefill.pool.rows([i])
        finish(decode, room, sender)
    assert prefill.manager.counters["peers"] == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stage", ["bootstrapping", "waiting", "transferring", "between chunks", "last queued"])
def test_abort(prefill: Prefill, decode: ChildWorker, side: str, stage: str) -> None:
    """The other side learns of it soon; once both are safe nothing of it is written: what is sent later has landed alone."""
    decode.wipe()
    dst, src = list(range(0, 800)), list(range(200, 1000))
    if stage == "bootstrapping":
        room = next(prefill.rooms)
        sender = prefill.manager.sender(room)
        decode.receiver(room, "b")
    else:
        room, sender = meet(prefill, decode, dst)
    if stage == "transferring":
        sender.send(SourcePages(src))
        until(lambda: decode.poll(room) >= KVPoll.Transferring)
    elif stage == "between chunks":
        sender.send(SourcePages(src[:10]))
        until(lambda: prefill.manager.counters.get("posts", 0) and prefill.manager.core.outbox.num_inflight == 0)
    elif stage == "last queued":
        sender.send(SourcePages(src, metadata_row=1))
    if side == "prefill":
        sender.abort("no more")
        if stage == "bootstrapping":  # it learns when it gives its pages
            until(lambda: decode.poll(room) is not KVPoll.Bootstrapping)
            decode.provide(room, dst, 0)
    else:
        decode.abort(room, "no more")
    until(lambda: sender.poll() in (KVPoll.Failed, KVPoll.Success))
    until(lambda: decode.poll(room) in (KVPoll.Failed, KVPoll.Success))
    if stage != "last queued":  # that one may have made it
        assert sender.poll() is decode.poll(room) is KVPoll.Failed
        assert "no more" in (sender.failure() or "")
        assert "no more" in decode.state(room)[1]
    finish(decode, room, sender)
    decode.wipe()
    finish_at_once(prefill, decode)
    assert decode.others([3]) == []


def test_different_lengths_are_refused(prefill: Prefill, decode: ChildWorker) -> None:
    for extra in (-1, 1):
        room, sender = meet(prefill, decode, list(range(10)))
        sender.send(SourcePages(list(range(10 + extra)), metadata_row=0))
        assert sender.poll() is KVPoll.Failed
        until(lambda r=room: decode.poll(r) is KVPoll.Failed)
        assert "decode gave 10 pages" in decode.state(room)[1]
        finish(decode, room, sender)


def test_mismatch_is_refused(prefill: Prefill) -> None:
    with prefill.decode(signature="model-b") as other:
        room = next(prefill.rooms)
        other.receiver(room, "b")
        until(lambda: other.poll(room) is KVPoll.Failed)
        text = other.state(room)[1]
        assert "signature" in text and "'model-a'" in text and "'model-b'" in text
        assert other.state(room)[2] is True
        other.close(room)


def test_decode_killed(prefill: Prefill, decode: ChildWorker) -> None:
    """Its rooms fail within 2 s, source pages come back, the other decode worker does not notice."""
    with prefill.decode() as victim:
        room, sender = meet(prefill, victim, list(range(900)))
        sender.send(SourcePages(list(range(500))))
        _, waiting = meet(prefill, victim, list(range(901, 920)))
        victim.kill()
        for lost in (sender, waiting):
            until(lambda s=lost: s.poll() is KVPoll.Failed, timeout_s=2.0, what="failure noticed")
        for lost in (sender, waiting):
            until(lost.released, timeout_s=5.0, what="source pages released")
            lost.close()
    until(lambda: prefill.manager.counters["peers"] <= 1, what="dead peer dropped")
    until(lambda: sum(prefill.mappings.of.values()) == 1, what="the dead worker's memory is let go")
    with prefill.decode() as successor:
        for child in (decode, successor):
            room, sender = meet(prefill, child, [3, 1, 2])
            sender.send(SourcePages([7, 8, 9], metadata_row=0))
            until(lambda c=child, r=room: c.poll(r) is KVPoll.Success)
            finish(child, room, sender)
    until(lambda: sum(prefill.mappings.of.values()) == 1, what="memory of the worker that left is let go")
    prefill.manager.check()


class Decode:
    """A decode worker in this process, for tests in which prefill dies or freezes."""

    def __init__(self, backend: str) -> None:
        self.pool = Pool(num_pages=NUM_PAGES, page_bytes=PAGE_BYTES, seed=None)
        self.route: Route
        config = TransferConfig(**CONFIG)
        engine = engine_of(backend, **FAKE)
        self.manager = DecodeManager(self.pool.args, engine, config, lookup=lambda server, room, _: self.route)
        self.manager.start()


@pytest.fixture(params=WAYS)
def lone_decode(request: pytest.FixtureRequest) -> Iterator[tuple[str, Decode]]:
    worker = Decode(request.param)
    yield request.param, worker
    worker.manager.check()
    assert worker.manager.counters["rooms"] == 0
    assert worker.manager.close()


def prefill_child(backend: str, decode: Decode) -> ChildWorker:
    pool = {"num_pages": NUM_PAGES, "page_bytes": PAGE_BYTES, "seed": 9}
    child = ChildWorker(role="prefill", backend=backend, pool=pool, config=CONFIG, engine={"fake_delay_s": 0.3})
    decode.route = Route(*child.address())
    return child


def test_prefill_killed_and_replaced(lone_decode: tuple[str, Decode]) -> None:
    backend, decode = lone_decode
    with prefill_child(backend, decode) as prefill:
        prefill.sender(1)
        prefill.sender(2)
        one, two = (decode.manager.receiver(room, bootstrap="b") for room in (1, 2))
        for i, receiver in enumerate((one, two)):
            until(lambda r=receiver: r.poll() is KVPoll.WaitingForInput)
            receiver.provide(TargetPages(list(range(400 * i, 400 * i + 400)), i))
        until(lambda: prefill.poll(1) is KVPoll.WaitingForInput)
        prefill.send(1, list(range(300)), 0, None)
        until(lambda: one.poll() is KVPoll.Transferring)
        assert not one.drained() and not two.drained()
        prefill.kill()
        for receiver in (one, two):
            until(lambda r=receiver: r.poll() is KVPoll.Failed, timeout_s=2.0, what="death noticed")
            assert "connection was lost" in (receiver.failure() or "")
        for receiver in (one, two):
            until(receiver.drained, timeout_s=5.0, what="death proven")
            receiver.close()
    decode.pool.wipe()
    with prefill_child(backend, decode) as successor:
        successor.sender(1)
        again = decode.manager.receiver(1, bootstrap="b")
        rig.meet(successor, 1, again, [5, 6], 3)
        successor.send(1, [8, 9], 0, 2)
        until(lambda: again.poll() is KVPoll.Success)
        if moves_pages(backend):
            assert decode.pool.pages([5, 6]) == successor.pages([8, 9])
        if moves_rows(backend):
            assert decode.pool.rows([3]) == successor.rows([2])
        assert decode.pool.others([5, 6]) == []
        again.close()


def test_prefill_frozen(lone_decode: tuple[str, Decode]) -> None:
    """Silence fails the room, but its pages stay quarantined until prefill reports that it has drained."""
    backend, decode = lone_decode
    with prefill_child(backend, decode) as prefill:
        prefill.sender(1)
        receiver = decode.manager.receiver(1, bootstrap="b")
        rig.meet(prefill, 1, receiver, list(range(300)), 0)
        prefill.signal(signal.SIGSTOP)
        until(lambda: receiver.poll() is KVPoll.Failed, timeout_s=3.0)
        assert "does not answer" in (receiver.failure() or "")
        assert not receiver.drained()
        with pytest.raises(RuntimeError, match="before its pages were drained"):
            receiver.close()
        prefill.signal(signal.SIGCONT)
        until(receiver.drained, what="acknowledged after it woke up")
        receiver.close()
        until(lambda: prefill.poll(1) is KVPoll.Failed)
        prefill.sender(2)
        good = decode.manager.receiver(2, bootstrap="b")
        rig.meet(prefill, 2, good, [1], 0)
        prefill.send(2, [1], 0, 0)
        until(lambda: good.poll() is KVPoll.Success)
        good.close()
