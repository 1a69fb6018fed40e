"""One engine for all ranks: what ends when, and what a room waits for while ranks end in any order and fail alone. Pure."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.transfer.cores import CAPS, KEY, SRC, JoinedCores
from tests.transfer.engines.hand_engine import HandEngine, driven
from tests.transfer.ranks.rank_memory import Model, Side, args_of
from transfer_backends.contract import EngineError, OpState
from transfer_backends.engines.rank_engines import RankEngines, combine
from transfer_backends.prefill.manager import EngineDriver
from transfer_backends.prefill.paths import PathState
from transfer_backends.prefill.trials import Trials
from transfer_backends.shards import pack_descriptors
from transfer_backends.sides import KVPoll

TWO = args_of(Model(heads=2, layers=2), Side(2), 2, num_pages=64)
WINDOW = replace(CAPS, max_inflight=64)
DONE, FAILED, PENDING = OpState.DONE, OpState.FAILED, OpState.PENDING


class Prefill:
    """Prefill's core and sender thread over engines of two ranks, one turn at a time; decode has two ranks, too."""

    def __init__(self) -> None:
        self.engines = [HandEngine(), HandEngine()]
        self.pair = JoinedCores(TWO, sends=False, caps=WINDOW, connects=False)
        self.now_s = 0.0
        ranks = RankEngines(self.engines)
        trials = Trials(caps=ranks.caps, machine="", on_gpu=False, clock=lambda: self.now_s, sockets=dict)
        self.driver = EngineDriver(
            engine=ranks, of_ranks=ranks, core=self.pair.core, trials=trials, locked=self._locked
        )
        self.turn()
        for engine in self.engines:
            assert [op.what for op in engine.ops] == ["probe"]
            engine.end("probe")
        self.turn()
        self.pair.begin()
        self.pair.send(SRC, row=1)
        self.turn()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[float]:
        yield self.now_s

    def turn(self) -> None:
        driven(self.driver.step)
        self.pair.exchange()

    def end(self, rank: int, what: str, state: OpState = DONE) -> None:
        self.engines[rank].end(what, state)
        self.turn()

    @property
    def room(self):  # type: ignore[no-untyped-def]
        return self.pair.core.rooms[KEY]

    @property
    def pending(self) -> list[list[str]]:
        return [[op.what for op in engine.ops if op.state is PENDING] for engine in self.engines]


def test_success_waits_for_the_last_rank_in_any_order() -> None:
    prefill = Prefill()
    assert prefill.pending == [["post"] * 3, ["post"] * 2]  # two posts of two pages each, and the leader's row
    prefill.end(0, "post")
    assert prefill.room.state is KVPoll.Transferring and prefill.pair.decode.rooms[KEY].state is not KVPoll.Success
    prefill.end(1, "post")
    assert prefill.pair.states == (KVPoll.Success, KVPoll.Success)


def test_one_rank_that_fails_fails_the_try_and_nothing_is_quiet_before_both_have_ended() -> None:
    """Rank 1 fails first. The next try begins after a fence over both, and writes both parts again."""
    prefill = Prefill()
    prefill.end(1, "post", FAILED)
    assert prefill.room.write_try == 1 and prefill.pending == [["post"] * 3, []]
    prefill.pair.decode.rooms.abort(prefill.pair.decode.rooms[KEY], "user", 0.0)
    prefill.pair.exchange()
    assert prefill.room.final and not prefill.room.quiet and not prefill.pair.decode.rooms[KEY].drained
    prefill.end(0, "post")
    assert prefill.pending == [["fence"], ["fence"]]
    prefill.end(1, "fence")
    assert not prefill.room.quiet and not prefill.pair.decode.rooms[KEY].drained  # a fence of one pair fences nothing
    prefill.end(0, "fence")
    assert prefill.room.quiet and prefill.pair.decode.rooms[KEY].drained


def test_a_second_try_after_a_fence_over_both_writes_both_parts_again() -> None:
    prefill = Prefill()
    prefill.end(0, "post")
    prefill.end(1, "post", FAILED)
    prefill.end(0, "fence")
    assert prefill.pending == [[], ["fence"]] and prefill.room.awaits_fence
    prefill.end(1, "fence")
    assert prefill.pending == [["post"] * 3, ["post"] * 2]
    for rank in (1, 0):
        prefill.end(rank, "post")
    assert prefill.pair.states == (KVPoll.Success, KVPoll.Success)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_a_fence_that_fails_for_one_pair_fails_for_the_path(ranks: tuple[int, int]) -> None:
    prefill = Prefill()
    path = prefill.pair.core.peers.get("d").path  # type: ignore[union-attr]
    prefill.end(0, "post")
    prefill.end(1, "post", FAILED)
    prefill.end(ranks[0], "fence", FAILED)
    assert path.state is PathState.FENCING  # the other one still runs
    prefill.end(ranks[1], "fence")
    assert path.state is PathState.CONNECTING and KEY in path.landing and not prefill.room.quiet


def test_a_post_that_one_rank_refuses_stops_the_try() -> None:
    prefill = Prefill()
    prefill.end(1, "post", FAILED)
    prefill.engines[1].refuses = {"post"}
    prefill.end(0, "post")
    for rank in (0, 1):
        prefill.end(rank, "fence")
    assert prefill.room.state is KVPoll.Failed
    assert "post is refused" in prefill.room.reason and "(2 times)" in prefill.room.reason


def test_a_fence_that_one_rank_refuses_has_failed() -> None:
    """The others' have begun, so it ends with them."""
    engines = [HandEngine(), HandEngine()]
    ranks = RankEngines(engines)
    peer = ranks.connect("d", pack_descriptors([(0, 0), (1, 1)], TWO.ranks))
    engines[1].refuses = {"fence"}
    op = ranks.fence(peer)
    assert ranks.poll(op) is PENDING
    engines[0].end("fence")
    assert ranks.poll(op) is FAILED
    engines[0].refuses = {"fence"}
    with pytest.raises(EngineError, match="fence is refused"):  # nothing has begun
        ranks.fence(peer)


def test_a_connection_of_which_one_pair_fails_leaves_none() -> None:
    engines = [HandEngine(), HandEngine()]
    engines[1].refuses = {"connect"}
    with pytest.raises(EngineError, match="connect is refused"):
        RankEngines(engines).connect("d", pack_descriptors([(0, 0), (0, 1), (1, 1)], TWO.ranks))
    assert engines[0].connected == []
    with pytest.raises(EngineError, match="not a list of descriptors"):
        RankEngines(engines).connect("d", b"junk")


def test_the_narrowest_window_and_the_longest_waits() -> None:
    one = replace(CAPS, max_inflight=8, max_post_bytes=10, settle_s=1.0, resend_s=9.0, longest_nap_s=0.1)
    other = replace(CAPS, max_inflight=4, max_post_bytes=20, settle_s=2.0, resend_s=3.0, target_must_poll=True)
    both = combine([one, other])
    assert (both.max_inflight, both.max_post_bytes, both.settle_s, both.resend_s) == (4, 10, 2.0, 9.0)
    assert both.target_must_poll and both.longest_nap_s == other.longest_nap_s and combine([one]) == one
    with pytest.raises(EngineError, match="different transfer engines: \\['sim', 'nixl'\\]"):
        combine([one, replace(other, name="nixl")])


def test_every_rank_s_engine_is_polled_and_closed() -> None:
    engines = [HandEngine(), HandEngine()]
    ranks = RankEngines(engines)
    ranks.progress(eager=True)
    ranks.close()
    assert [(engine.polls, engine.closed) for engine in engines] == [(1, True)] * 2
