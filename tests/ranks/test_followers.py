"""A leader's view of its followers, over real sockets; the followers here are the other ends of these."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.core.plan import PageCopy, Plan, StateCopy, StateRollback
from engine.images import ImageInput
from engine.messages import StartProfile
from engine.ranks.followers import Followers, GroupEnded, LivenessProbe, Process, is_proven
from engine.ranks.group import GroupProfiler, GroupWeights
from engine.ranks.messages import (
    Apply,
    Channel,
    Done,
    Failed,
    Loaded,
    PoolSize,
    Prepare,
    Ready,
    Serving,
    Step,
    ToFollower,
    ToLeader,
    follower_end,
    leader_end,
    plan_of,
    step_of,
)
from engine.ranks.rank_checksum import GroupChecksum
from service.flags import ConfigError
from service.process.message_stream import ChannelClosed, socket_pair
from tests.e2e.cluster import wait_until
from tests.loop.loop_in_a_test import FakeProfiler

SOON_S = 10.0


def named(rank: int) -> Process:
    return Process(f"rank {rank} of 3 (pid 47{rank})", lambda: "ended: SIGKILL")


@dataclass
class Group:
    """`there`: the followers' ends by rank. `ends`: what `on_end` got."""

    followers: Followers
    there: dict[int, Channel[ToFollower]]
    ends: list[tuple[str, bool]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def on_end(self, text: str, refused: bool) -> None:
        self.ends.append((text, refused))
        self.ended.set()

    def answer(self, *messages: ToLeader) -> None:
        for channel in self.there.values():
            for message in messages:
                channel.send(message)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """Of a limit (`indirect`), or without one."""
    members: dict[int, tuple[Channel[ToLeader], Process]] = {}
    there = {}
    for rank in (1, 2):
        own, theirs = socket_pair()
        members[rank] = (leader_end(own), named(rank))
        there[rank] = follower_end(theirs.detach())
    made: list[Group] = []
    limit_s = getattr(request, "param", 0.0)
    followers = Followers(members, on_end=lambda text, refused: made[0].on_end(text, refused), limit_s=limit_s)
    made.append(Group(followers, there))
    with closing(followers):
        yield made[0]
    for channel in there.values():
        channel.close()


def test_the_group_has_the_least_of_what_any_rank_holds(group: Group) -> None:
    group.there[1].send(Ready(900, "f", 20, 9, 512, 4096))
    group.there[2].send(Ready(700, "f", 30, 8, 1024, 2048))
    assert group.followers.await_ready(fingerprint="f", timeout_s=SOON_S) == Ready(700, "f", 20, 8, 512, 2048)
    group.followers.place(PoolSize(700, 10))
    assert [channel.receive() for channel in group.there.values()] == [PoolSize(700, 10)] * 2
    group.answer(Serving())
    group.followers.await_serving(timeout_s=SOON_S)


def test_other_weights_are_refused_by_rank(group: Group) -> None:
    group.there[1].send(Ready(900, "mine"))
    group.there[2].send(Ready(900, "theirs"))
    with pytest.raises(ConfigError, match=r"--model-path: rank 2 of 3 .* reads other files .*theirs and mine"):
        group.followers.await_ready(fingerprint="mine", timeout_s=SOON_S)


def test_a_rank_that_is_late_is_named(group: Group) -> None:
    group.there[2].send(Ready(900, "f"))
    with pytest.raises(ConfigError, match=r"--dist-timeout: rank 1 of 3 \(pid 471\) has not loaded its weights"):
        group.followers.await_ready(fingerprint="f", timeout_s=0.05)


def test_a_rank_that_loads_too_long_is_named_before_any_measures(group: Group) -> None:
    group.there[1].send(Loaded())
    with pytest.raises(ConfigError, match=r"--dist-timeout: rank 2 of 3 \(pid 472\) has not loaded its weights"):
        group.followers.await_loaded(timeout_s=0.05)


def test_only_a_step_of_copies_alone_is_answered(group: Group) -> None:
    """The result of a step with items proves that every rank ran it."""
    copies = Plan(seq=1, extend=False, items=[], to_host=[PageCopy(1, 2)])
    pending = group.followers.step(copies)
    assert pending is not None
    for channel in group.there.values():
        step = channel.receive()
        assert isinstance(step, Step)
        channel.send(Done(step.answer))
    pending.wait()
    assert group.followers.step(Plan(seq=2, extend=False, items=[])) is None


def test_on_gpus_copies_beside_a_forward_are_answered_too() -> None:
    (item,) = plan_of(Step(1, False, [0], [], [7], [0], [], [], [], [])).items
    plans = [
        Plan(seq=1, extend=False, items=items, to_host=copies)
        for items in ([], [item])
        for copies in ([], [PageCopy(1, 2)])
    ]
    assert [is_proven(plan) for plan in plans] == [True, False, True, True]
    own, theirs = socket_pair()
    members: dict[int, tuple[Channel[ToLeader], Process]] = {1: (leader_end(own), named(1))}
    with theirs, closing(Followers(members, on_end=lambda text, refused: None, copies_beside=True)) as followers:
        assert [followers.step(plan) is None for plan in plans] == [True, False, True, False]


def test_a_step_takes_states_back_on_all_ranks(group: Group) -> None:
    states, rewinds = [StateCopy(None, 3)], [StateRollback(0, 17), StateRollback(4, 9)]
    group.followers.step(Plan(seq=1, extend=False, items=[], states=states, rewinds=rewinds))
    for channel in group.there.values():
        step = channel.receive()
        assert isinstance(step, Step)
        assert plan_of(step).rewinds == rewinds and plan_of(step).states == states


def test_ranks_that_take_no_messages_are_found(group: Group) -> None:
    first = 1  # the number of what is asked
    group.there[2].send(Done(first))
    wait_until(lambda: "rank 2" not in group.followers.answers.missing(first), within_s=SOON_S, what="rank 2 answers")
    assert group.followers.silent(within_s=0.05) == [1]


def test_an_answer_calls_once_all_have_given_it(group: Group) -> None:
    called = threading.Event()
    pending = group.followers.apply("anything")
    pending.when_there(called.set)
    for channel in group.there.values():
        assert not called.is_set() and not pending.there()
        applied = channel.receive()
        assert isinstance(applied, Apply)
        channel.send(Done(applied.number))
    assert called.wait(SOON_S) and pending.there()
    late = threading.Event()
    pending.when_there(late.set)
    assert late.is_set()


def test_values_come_by_rank_and_a_refusal_names_its_rank(group: Group) -> None:
    pending = group.followers.apply("checksum", pages=[1])
    for rank, channel in reversed(group.there.items()):
        applied = channel.receive()
        assert isinstance(applied, Apply) and applied.args == {"pages": [1]}
        channel.send(Done(applied.number, value=rank * 10))
    assert pending.wait() == {1: 10, 2: 20}

    prepared = group.followers.prepare("adapter", path="x")
    for rank, channel in group.there.items():
        asked = channel.receive()
        assert isinstance(asked, Prepare)
        channel.send(Done(asked.number, error="x: no such directory" if rank == 2 else ""))
    with pytest.raises(ConfigError, match=r"rank 2 of 3 \(pid 472\): x: no such directory"):
        prepared.wait()


def checksum(group: Group, copies: list[list[int]], values: dict[int, int]) -> int | None:
    """Of one page, when rank r of `copies` has computed `values[r]`."""
    parts = {rank: {str(copy): values[rank]} for copy in copies for rank in copy}
    value = GroupChecksum(lambda pages, tail, num_tokens: lambda: parts[0], group.followers)([1])
    assert value() is None
    for rank, channel in group.there.items():
        applied = channel.receive()
        assert isinstance(applied, Apply)
        channel.send(Done(applied.number, value=parts[rank]))
    answered = threading.Event()
    late = group.followers.apply("anything")  # the reading thread takes answers in order
    late.when_there(answered.set)
    for channel in group.there.values():
        channel.receive()
    group.answer(Done(late.number))
    assert answered.wait(SOON_S)
    found = value()
    assert value() == found
    return found


@pytest.mark.parametrize(
    ("copies", "values", "total"),
    [
        ([[0], [1], [2]], {0: 5, 1: 10, 2: 20}, 35),
        ([[0], [1, 2]], {0: 5, 1: 10, 2: 10}, 15),
        ([[0, 2], [1]], {0: 5, 1: 10, 2: 5}, 15),
        ([[0, 1, 2]], {0: 5, 1: 5, 2: 5}, 5),
    ],
)
def test_a_checksum_counts_each_part_once_and_looks_at_every_copy(
    group: Group, copies: list[list[int]], values: dict[int, int], total: int
) -> None:
    """Where copies differ no peer has its value, nor one in which the same copy is damaged."""
    assert checksum(group, copies, values) == total
    for replicas in copies:
        if len(replicas) > 1:
            damaged = [{**values, rank: values[rank] + 1} for rank in (*replicas, *replicas)]
            found = {checksum(group, copies, those) for those in damaged}
            assert len(found - {total}) == len(damaged)


def test_a_profile_that_one_rank_refuses_runs_at_none(group: Group) -> None:
    own = FakeProfiler()
    starting = threading.Thread(target=answer_profiles, args=(group,))
    starting.start()
    with pytest.raises(ConfigError, match=r"rank 2 of 3 \(pid 472\): output_dir: no file can be written"):
        GroupProfiler(own, group.followers).start(StartProfile(call_id="c"))
    starting.join(SOON_S)
    assert own.calls == ["start", "stop"]


def answer_profiles(group: Group) -> None:
    """Rank 2 cannot write where the others can, and so has nothing to stop."""
    for name in ("start_profile", "stop_profile"):
        for rank, channel in group.there.items():
            applied = channel.receive()
            assert isinstance(applied, Apply) and applied.name == name
            error = (
                "" if rank == 1 else "output_dir: no file can be written" if name == "start_profile" else "none runs"
            )
            channel.send(Done(applied.number, error=error))


@pytest.mark.parametrize(
    ("end", "text", "refused"),
    [
        (lambda channel: channel.close(), "rank 1 of 3 (pid 471) ended: SIGKILL", False),
        (lambda channel: channel.send(Failed("no memory", True)), "rank 1 of 3 (pid 471): no memory", True),
    ],
)
def test_the_end_of_one_ends_the_group_once_by_name(
    group: Group, end: Callable[[Channel[ToFollower]], None], text: str, refused: bool
) -> None:
    end(group.there[1])
    assert group.ended.wait(SOON_S)
    assert group.ends == [(text, refused)]
    group.followers.step(Plan(seq=1, extend=False, items=[]))  # sends to the rest; raises nothing
    with pytest.raises(GroupEnded, match="rank 1 of 3"):
        group.followers.await_serving(timeout_s=SOON_S)


def test_a_follower_that_reads_nothing_is_named_and_the_leader_never_waits(group: Group) -> None:
    copies = Plan(seq=1, extend=False, items=[], closes=list(range(100)), drops=list(range(5000)))
    for _ in range(100_000):
        group.followers.step(copies)
        if group.ends:
            break
    assert group.ends[0][0].startswith("rank 1 of 3 (pid 471) reads no steps")


@pytest.mark.parametrize("group", [0.02], indirect=True)
def test_a_follower_that_answers_nothing_is_named_though_no_step_needs_it(group: Group) -> None:
    group.answer(Serving())
    group.followers.await_serving(timeout_s=SOON_S)
    while not group.ended.wait(0.0):
        asked = group.there[1].receive()
        assert asked == Apply(asked.number, "answer", {})  # type: ignore[union-attr]
        group.there[1].send(Done(asked.number))
        group.ended.wait(SOON_S)
    assert group.ends[0][0].startswith("rank 2 of 3 (pid 472): takes no messages for ")


def test_the_leaders_orderly_end_is_an_end_of_file(group: Group) -> None:
    group.followers.close()
    with pytest.raises(ChannelClosed):
        group.there[1].receive()
    assert group.ends == []


def test_other_weights_without_memory_for_their_graphs_end_the_group(group: Group) -> None:
    """The followers have recorded theirs: ranks with and without graphs pad their sums differently."""

    def install(model: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    weights = GroupWeights(group.followers, load=lambda *args, **more: None, install=install)  # type: ignore[arg-type, return-value]
    model: Any = None
    with pytest.raises(GroupEnded, match="graphs of the new weights, this one has no memory: CUDA out of memory"):
        weights.install(model)
    assert all(isinstance(channel.receive(), Apply) for channel in group.there.values())


def test_pixels_go_to_the_first_stage_alone() -> None:
    """A rank of a later one gets the same step without them: it computes from hidden states."""
    image, ends, there = ImageInput(0, 1, b"k" * 32, (1, 2, 2), 2, (1, 2, 2), bytes(1000)), {}, []
    for rank in (1, 2):
        own, theirs = socket_pair()
        ends[rank] = (leader_end(own, sees=True), named(rank))
        there.append(follower_end(theirs.detach()))
    (item,) = plan_of(Step(1, True, [0], [1], [7], [0], [], [], [], [])).items
    plan = Plan(seq=1, extend=True, items=[item], encodes=[image], forgets=[b"f" * 32])
    members: dict[int, tuple[Channel[ToLeader], Process]] = {**ends}
    with closing(Followers(members, on_end=lambda text, refused: None, num_first=2)) as followers:
        followers.step(plan)
        first, later = (channel.receive() for channel in there)
    assert isinstance(first, Step) and isinstance(later, Step)
    assert (first.encodes, first.forgets) == ([image], [b"f" * 32])
    assert (later.encodes, later.forgets, later.tokens) == ([], [], first.tokens)
    for channel in there:
        channel.close()


def test_steps_may_follow_one_whose_pixels_are_not_sent_yet() -> None:
    own, theirs = socket_pair()
    pixels = bytes(12 << 20)
    with closing(leader_end(own, sees=True)) as leader, closing(follower_end(theirs.detach())) as follower:
        image = ImageInput(0, 1, b"k" * 32, (1, 2, 2), 2, (1, 2, 2), pixels)
        for seq in range(1, 4):
            leader.send(step_of(Plan(seq=seq, extend=True, items=[], encodes=[image])))
        steps = [follower.receive() for _ in range(3)]
    assert [step.seq for step in steps if isinstance(step, Step)] == [1, 2, 3]


# ---- when followers are asked whether they take messages


def test_one_question_at_a_time_and_steps_may_be_ahead_of_it() -> None:
    call = LivenessProbe(8.0)
    assert call.every_s == 2.0
    assert call.due(100.0) and not call.due(103.0), "the first is not answered"
    assert call.late_s(116.0) is None
    call.answered()
    assert not call.due(101.9) and call.due(102.0)
    assert call.late_s(118.0) is None and call.late_s(118.5) == 16.5


def test_no_limit_asks_nothing() -> None:
    call = LivenessProbe(0.0)
    assert call.every_s is None and not call.due(1000.0) and call.late_s(1e6) is None
