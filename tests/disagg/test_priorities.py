"""Priorities through both roles: which request gets decode's memory first, and at whose cost."""

import random

import pytest

from engine.core.policy import NO_PRIORITIES, Priorities
from tests.core.hash_model import expected_tokens
from tests.disagg.two_roles import Cluster

PRIORITIES = Priorities(preempt_threshold=10)
WAYS = {"recompute": {}, "host": {"backup_pages": 100}, "prefill": {"resume_elsewhere": True}}


def cluster_of(decode_pages: int, *, depth: int = 1, priorities: Priorities = PRIORITIES, **decode: object) -> Cluster:
    return Cluster(pages=(200, decode_pages), depth=depth, both={"priorities": priorities}, **decode)


def until_running(cluster: Cluster, *rids: str) -> None:
    rng = random.Random(3)
    for _ in range(200):
        if {r.rid for r in cluster.decode.scheduler.stages.running} >= set(rids):
            return
        cluster.turn(rng)
    raise AssertionError(f"these do not run together: {rids}")


def order_of_ends(cluster: Cluster) -> list[str]:
    cluster.run(random.Random(5))
    cluster.assert_all_back()
    return list(cluster.decode.finish)


@pytest.mark.parametrize(
    ("priorities", "ends"),
    [
        (PRIORITIES, ["running", "high", "first", "last"]),
        (Priorities(low_first=True), ["running", "first", "last", "high"]),
        (NO_PRIORITIES, ["running", "first", "high", "last"]),
    ],
)
def test_decode_gives_memory_to_the_highest_priority_first(priorities: Priorities, ends: list[str]) -> None:
    """Memory for one at a time; none is high enough to preempt."""
    cluster = cluster_of(8, priorities=priorities)
    cluster.submit("running", list(range(16)), 1, new=16)
    until_running(cluster, "running")
    for room, (rid, priority) in enumerate({"first": 0, "high": 5, "last": 0}.items(), start=2):
        cluster.submit(rid, [room, *range(15)], room, new=16, priority=priority)
    assert order_of_ends(cluster) == ends
    assert cluster.decode.scheduler.counters.preemptions == 0


def test_age_counts_in_decodes_line_too() -> None:
    cluster = cluster_of(8, priorities=Priorities(aging_s=10.0))
    cluster.submit("running", list(range(16)), 1, new=16)
    until_running(cluster, "running")
    cluster.submit("old", [2, *range(15)], 2, new=16)
    for engine in (cluster.prefill, cluster.decode):
        engine.now_s = 100.0
    cluster.submit("young", [3, *range(15)], 3, new=16, priority=5)
    assert order_of_ends(cluster) == ["running", "old", "young"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("priority", [10, 11])
def test_a_much_higher_priority_takes_decodes_memory(way: str, depth: int, priority: int) -> None:
    """Two of low priority hold what one of high priority needs; both give it, and go on afterwards with the same tokens."""
    cluster = cluster_of(12, depth=depth, **WAYS[way])
    prompts = {"low": [1, *range(7)], "poor": [2, *range(7)], "high": [3, *range(27)]}
    cluster.submit("low", prompts["low"], 1, new=16)
    cluster.submit("poor", prompts["poor"], 2, new=16)
    until_running(cluster, "low", "poor")
    cluster.submit("high", prompts["high"], 3, new=16, priority=priority)
    ends = order_of_ends(cluster)
    assert (ends[0] == "high") == (priority == 11)
    assert cluster.decode.scheduler.counters.preemptions == (2 if priority == 11 else 0)
    assert cluster.decode.tokens == {rid: expected_tokens(prompt, 16) for rid, prompt in prompts.items()}


def test_decode_preempts_no_request_in_vain() -> None:
    """ "top" and "high" do not fit together, so "low", which fits beside "top", goes on."""
    cluster = cluster_of(12)
    cluster.submit("top", [1, *range(19)], 1, new=8, priority=100)
    cluster.submit("low", [2, *range(7)], 2, new=8)
    until_running(cluster, "top", "low")
    cluster.submit("high", [3, *range(23)], 3, new=8, priority=50)
    assert order_of_ends(cluster)[-1] == "high"
    assert cluster.decode.scheduler.counters.preemptions == 0


def test_a_more_urgent_request_goes_before_a_retracted_one() -> None:
    """What decode retracted comes before new requests, unless these have a higher priority."""
    for priority, b_waits in ((0, False), (5, True)):
        cluster, rng = cluster_of(13, conservativeness=0.0), random.Random(3)
        cluster.submit("a", [1, *range(7)], 1, new=24, priority=5)
        cluster.submit("b", [2, *range(7)], 2, new=24)
        until_running(cluster, "a", "b")
        cluster.submit("c", [3, *range(7)], 3, new=24, priority=priority)
        decode = cluster.decode.scheduler
        while not decode.stages.live["c"].pages:
            cluster.turn(rng)
        assert decode.counters.out_of_memory == 1
        assert ("b" in [r.rid for r in decode.stages.retracted()]) == b_waits
        order_of_ends(cluster)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_is_taken_from_the_lowest_priority(way: str, depth: int) -> None:
    """Memory for all, a row for one."""
    cluster = cluster_of(100, depth=depth, max_running=1, **WAYS[way])
    cluster.submit("low", [1, *range(7)], 1, new=90)
    until_running(cluster, "low")
    for room, (rid, priority) in enumerate({"mean": 3, "high": 20}.items(), start=2):
        cluster.submit(rid, [room, *range(7)], room, new=16, priority=priority)
    until_running(cluster, "mean", "high")
    ends = order_of_ends(cluster)
    assert ends == ["high", "mean", "low"]
    assert cluster.decode.scheduler.counters.preemptions == 1
    assert cluster.decode.tokens["low"] == expected_tokens([1, *range(7)], 90)
