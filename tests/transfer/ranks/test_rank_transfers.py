"""Transfers between workers of several rank processes, over real engines: byte for byte, and when a rank is killed."""

import contextlib
import signal
from collections.abc import Iterator
from itertools import product

import pytest

from tests.transfer.ranks.rank_child import pages_of
from tests.transfer.ranks.rank_memory import Model, Side
from tests.transfer.ranks.rank_workers import CONFIG, SEED, RankPair, RankProcess, Ranks, connect, spec_of
from tests.transfer.rig import join, succeed, until
from transfer_backends.contract import Route
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.rooms import KVPoll

MODEL = Model(heads=128, layers=4)  # 512 bytes a layer
ONE_HEAD = Model(heads=1, layers=4)
SRC, DST = [3, 4, 5, 9, 1], [6, 7, 8, 2, 10]
SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[list[RankProcess], list[RankProcess]]]:
    """Three followers of prefill workers and three of decode workers, which serve all tests of this module."""
    with contextlib.ExitStack() as stack:
        sides = [[stack.enter_context(RankProcess()) for _ in range(3)] for _ in range(2)]
        yield sides[0], sides[1]


Processes = tuple[list[RankProcess], list[RankProcess]]
CASES = [
    *(("nixl", MODEL, Side(p), Side(d), max(p, d)) for p, d in product(SIZES, SIZES)),
    ("nixl", MODEL, Side(2), Side(2), 4),
    ("nixl", MODEL, Side(1, 2), Side(1), 1),
    ("nixl", MODEL, Side(1), Side(2, 2), 2),
    ("nixl", ONE_HEAD, Side(4), Side(2), 1),
    ("nixl", ONE_HEAD, Side(2), Side(1), 1),
    *(("mooncake", MODEL, Side(p), Side(d), max(p, d)) for p, d in ((1, 2), (2, 1))),
]


@pytest.mark.parametrize(("backend", "model", "prefill", "decode", "units"), CASES, ids=str)
def test_decode_s_units_together_are_prefill_s(
    processes: Processes, backend: str, model: Model, prefill: Side, decode: Side, units: int
) -> None:
    source = Ranks(processes[0], model, prefill, units, backend=backend, seed=SEED)
    target = Ranks(processes[1], model, decode, units, backend=backend, seed=None)
    with contextlib.closing(RankPair(source, target)) as pair:
        sender, receiver = pair.prefill.sender(1), pair.decode.receiver(1, bootstrap="b")
        join(sender, receiver, DST, 2)
        sender.send(SRC[:2], start=0)
        sender.send(SRC[2:], start=2, metadata_row=1)
        succeed(sender, receiver)
        pages = pages_of(model, units, SEED)
        for number, memory in enumerate(target.all_bytes()):
            assert memory.right(pages, model, units, DST, SRC), f"decode's rank {number}"
        assert (target.rows[2] == 1).all() and not target.rows[[0, 1, 3]].any()


# ---- a rank is killed


class Scene:
    """A prefill worker of two rank processes, leader included, and a decode worker of two whose leader is here. Over TCP, so that
    a write ends only if its target runs."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        tcp = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
        self.leader, self.follower, self.target = (stack.enter_context(RankProcess(**tcp)) for _ in range(3))
        mine = connect(self.follower, MODEL, Side(2), 2, 1, "nixl", SEED)
        self.leader.call([mine], **spec_of(MODEL, Side(2), 2, 0, "nixl", SEED))
        self.ranks = Ranks([self.target], MODEL, Side(2), 2, backend="nixl", seed=None)
        route = Route(*self.leader.do("route"))
        self.life = route.incarnation
        self.decode = DecodeManager(self.ranks.args, self.ranks.engine, CONFIG, lookup=lambda *_: route)
        stack.callback(self.decode.close)
        self.decode.start()
        self.leader.do("open", 1)
        self.receiver = self.decode.receiver(1, bootstrap="b")
        until(lambda: self.receiver.poll() is KVPoll.WaitingForInput)
        self.receiver.provide(DST, 2)
        until(lambda: self.leader.do("state")[0] == KVPoll.WaitingForInput)

    def begin(self) -> None:
        """Decode's second rank stands still, and a write to it waits."""
        self.target.signal(signal.SIGSTOP)
        self.leader.do("send", SRC)
        until(lambda: self.leader.do("state")[3] > 0)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        yield Scene(stack)


def test_no_page_is_free_before_every_rank_of_a_dead_prefill_worker_is_gone(scene: Scene) -> None:
    """The leader is killed, and its follower lives and writes."""
    asked: list[object] = []
    look = scene.decode._liveness
    scene.decode._liveness = lambda mark, control: (asked.append(mark), look(mark, control))[1]
    scene.begin()
    scene.leader.kill()
    until(lambda: scene.receiver.poll() is KVPoll.Failed)
    marks = scene.decode.core.peers.get(scene.life).marks  # type: ignore[union-attr]
    assert [mark.pid for mark in marks] == [scene.leader.process.pid, scene.follower.process.pid]
    until(lambda: asked.count(marks[1]) >= 3)  # each look finds the leader dead and the follower alive
    assert not scene.receiver.drained() and scene.decode.counters["exposed_rooms"] == 1
    scene.follower.kill()
    until(scene.receiver.drained)
    scene.receiver.close()


def test_a_killed_follower_fails_its_writes_and_is_named(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """First prefill's, then decode's. Its leaders would end the workers now; here they live, and no page is free meanwhile."""
    scene.begin()
    scene.follower.kill()
    until(lambda: scene.leader.do("state")[3] == 0)  # its operation has ended; those of the leader had
    state, _, released, _ = scene.leader.do("state")
    assert KVPoll(state) is KVPoll.Transferring and not released  # a second try waits for a fence that cannot hold
    assert scene.receiver.poll() is not KVPoll.Success and not scene.receiver.drained()
    scene.target.kill()
    (remote,) = scene.ranks.remotes
    until(lambda: remote.lost)
    assert f"rank 1 (pid {scene.target.process.pid}): its transfer engine is lost" in caplog.text
    scene.leader.kill()
    until(scene.receiver.drained)
    scene.receiver.close()
