"""Both roles, the production scheduler and the hash model in one thread: by literals, then whatever a story draws."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from engine.core.mem_cache.host_cache import HostCache, TierRoom
from tests.core.hash_model import Slot, expected_tokens
from tests.core.mem_cache.tiers_in_a_test import identity
from tests.core.proof.shares import Share, shares
from tests.disagg.two_role_stories import TwoRoleStory, play, stories_of_lanes, two_role_stories
from tests.disagg.two_roles import Cluster, crowded, run_retracted_first
from transfer_backends.contract import Gate, SourcePages

LEAST = {"stories": 100, "retractions": 5, "restored_tokens": 20, "chunks": 500, "overlapped": 1000, "preemptions": 20}
LEAST |= {
    "end:length": 200,
    "end:stop": 50,
    "end:abort": 100,
    "quarantined": 20,
    "masks": 300,
    "gated": 500,
    "skipped": 20,
}
LEAST |= {"resumed_elsewhere": 5, "resume_failures": 3, "failed_steps": 50}
LEAST |= {"whole_at_prefill": 100, "whole_at_decode": 100, "whole_retracted": 5}


Sent = tuple[int, int, Gate | None, bool]  # start, pages, gate, last


@pytest.mark.parametrize("backup_pages", [0, 1000])
@pytest.mark.parametrize("depth", [1, 2])
def test_retracted_requests_come_before_new_ones(depth: int, backup_pages: int) -> None:
    cluster, prompts = crowded(depth=depth, backup_pages=backup_pages, resume_elsewhere=False)
    run_retracted_first(cluster)
    decode = cluster.decode
    assert decode.tokens == {rid: expected_tokens(p, 24) for rid, p in prompts.items()}
    saved = decode.role.counters()["backup_saved_tokens"]
    assert (saved > 0) == (backup_pages > 0) and decode.role.counters()["backup_restored_tokens"] == saved
    cluster.assert_all_back()


@pytest.mark.parametrize("depth", [1, 2])
def test_pages_are_handed_over_when_their_step_is_launched(depth: int) -> None:
    """The cached ones whole, the others by layers, each once and in order; the metadata row when all is computed."""
    cluster = Cluster(pages=(60, 60), depth=depth, handover={"layerwise": True})
    sent: list[Sent] = []
    for room, length in ((1, 12), (2, 30)):
        cluster.submit(f"r{room}", list(range(length)), room, new=3)
        record(cluster, f"r{room}", sent)
        cluster.run(random.Random(depth))
        assert cluster.decode.scheduler.flush_cache()  # decode has nothing of it; prefill has
    first, second = sent[:3], sent[3:]
    steps = [gate.step for *_, gate, _ in sent if gate is not None]
    assert steps == sorted(steps) and [gate.by_layer for *_, gate, _ in first if gate] == [True, True]
    assert [(start, num, last) for start, num, _, last in first] == [(0, 2, False), (2, 1, False), (3, 0, True)]
    assert [(start, num) for start, num, *_ in second] == [(0, 3), (3, 2), (5, 2), (7, 1), (8, 0)]
    assert [gate and gate.by_layer for *_, gate, _ in second] == [False, True, True, True, None]
    assert cluster.decode.tokens == {f"r{room}": expected_tokens(list(range(n)), 3) for room, n in ((1, 12), (2, 30))}
    cluster.assert_all_back()


@pytest.mark.parametrize("depth", [1, 2])
def test_pages_from_the_host_leave_by_layers(depth: int) -> None:
    """They come back behind the compute: when their step begins they are not there yet. What was on the device is."""
    host = HostCache(room=TierRoom(100), identity=identity())
    handover, prefill = {"layerwise": True}, {"host": host}
    cluster = Cluster(pages=(16, 60), depth=depth, handover=handover, both={"chunk": 16}, prefill=prefill)
    prompt, rng = list(range(40)), random.Random(depth)
    for room, length in ((1, 40), (2, 16), (3, 40)):
        if room == 2:
            cluster.prefill.scheduler.memory.cache.flush()
        cluster.submit(f"r{room}", prompt[:length], room, new=2)
        if room == 3:
            sent: list[Sent] = []
            record(cluster, "r3", sent)
        cluster.run(rng)
        assert cluster.decode.scheduler.flush_cache()
    cached, loaded, row = sent
    assert [(start, num) for start, num, *_ in (cached, loaded, row)] == [(0, 4), (4, 6), (10, 0)]
    assert [gate and gate.by_layer for *_, gate, _ in sent] == [False, True, None]
    assert cluster.decode.tokens["r3"] == expected_tokens(prompt, 2)


def test_a_role_waits_for_outside_only_while_it_has_requests() -> None:
    """Its loop is woken often then, and sleeps otherwise."""
    cluster = Cluster(pages=(60, 60))
    roles = (cluster.prefill.role, cluster.decode.role)
    assert [role.waits_for_outside() for role in roles] == [False, False]
    cluster.submit("r", list(range(12)), 1, new=3)
    assert [role.waits_for_outside() for role in roles] == [True, True]
    cluster.run(random.Random(1))
    assert [role.waits_for_outside() for role in roles] == [False, False]


def test_few_pages_leave_with_the_last_chunk() -> None:
    """Chunks of two pages; fewer than three bytes, a page being one, do not leave beside the next chunk."""
    cluster = Cluster(pages=(60, 60), handover={"min_bytes": 3})
    sent: list[Sent] = []
    cluster.submit("r", list(range(30)), 1, new=3)
    record(cluster, "r", sent)
    cluster.run(random.Random(1))
    assert [(start, num, last) for start, num, _, last in sent] == [(0, 4, False), (4, 4, True)]
    assert cluster.decode.tokens == {"r": expected_tokens(list(range(30)), 3)}
    cluster.assert_all_back()


def test_what_decode_has_cached_is_not_sent() -> None:
    """The second turn of a conversation: its first pages are still with decode, the answer of the first turn among them."""
    cluster = Cluster(pages=(60, 60))
    prompt, wire = list(range(21)), cluster.wire
    cluster.submit("first", prompt, 1, new=8)
    cluster.run(random.Random(1))
    copied = len(wire.copied)
    assert (copied, wire.num_skipped) == (6, 0)
    again = [*prompt, *cluster.decode.tokens["first"], 1, 2, 3]
    cluster.submit("second", again, 2, new=4)
    cluster.run(random.Random(2))
    assert (len(wire.copied) - copied, wire.num_skipped) == (1, 7)  # 32 tokens; 28 of them have KV in whole pages
    assert cluster.decode.tokens["second"] == expected_tokens(again, 4)
    assert cluster.prefill.role.counters()["kv_skipped_bytes"] == 7
    cluster.assert_all_back()


def record(cluster: Cluster, rid: str, sent: list[Sent]) -> None:
    """Writes down what prefill hands over of a request."""
    sender: Any = cluster.prefill.role._prompts.handovers[rid].sender  # type: ignore[union-attr]
    send = sender.send

    def recorded(source: SourcePages) -> None:
        sent.append((source.start, len(source.pages), source.gate, source.metadata_row is not None))
        send(source)

    sender.send = recorded


@pytest.mark.parametrize("same", [True, False])
def test_kv_of_other_weights_is_for_its_request_alone(same: bool) -> None:
    """One worker has taken an update and the other not yet: what crosses then must not answer later requests."""
    cluster = Cluster(pages=(60, 60), weights=(1, 1 if same else 2))
    for room in (1, 2):
        cluster.submit(f"r{room}", list(range(12)), room, new=8)
        cluster.run(random.Random(room))
    assert cluster.decode.tokens == {rid: expected_tokens(list(range(12)), 8) for rid in ("r1", "r2")}
    assert (cluster.decode.scheduler.memory.allocator.counts()["cached"] > 0) == same
    cluster.assert_all_back()


def test_wrong_kv_is_seen() -> None:
    """The check of this file can fail: bytes of something else do not pass."""
    cluster = Cluster(pages=(50, 50))
    cluster.wire.copy_pages = lambda src, dst: cluster.decode.model.kv.update(  # type: ignore[method-assign]
        {(d, o): Slot(7, 7) for d in dst for o in range(4)}
    )
    cluster.submit("r", list(range(9)), 1, new=6)
    with pytest.raises(AssertionError, match="wrong KV at position 0"):
        cluster.run(random.Random(1))


def test_a_corrupt_metadata_row_fails_that_request_alone() -> None:
    cluster = Cluster(pages=(90, 90))
    copy_row = cluster.wire.copy_row
    cluster.wire.copy_row = lambda src, dst: None if src == 0 else copy_row(src, dst)  # type: ignore[method-assign]
    cluster.submit("bad", list(range(9)), 1, new=3)
    cluster.submit("good", list(range(8)), 2, new=3)
    rng = random.Random(0)
    cluster.run(rng)
    kinds = {rid: finish.kind for rid, finish in cluster.decode.finish.items()}
    assert sorted(kinds.values()) == ["abort", "length"]
    cluster.assert_all_back()


def test_prefill_computes_nothing_before_decode_has_given_its_pages() -> None:
    cluster = Cluster(pages=(50, 50))
    cluster.prefill.submit("r", list(range(20)), 1, new=6, prefill_only=True)
    for _ in range(10):
        cluster.prefill.turn()
    assert cluster.prefill.plans == []
    assert cluster.prefill.role.queues() == {"bootstrap": 1, "waiting": 0, "inflight": 0}
    cluster.decode.submit("r", list(range(20)), 1, new=6, prefill_only=False)
    cluster.run(random.Random(0))
    assert cluster.decode.tokens == {"r": expected_tokens(list(range(20)), 6)}
    cluster.assert_all_back()


def test_waiting_for_memory_has_an_end() -> None:
    cluster = Cluster(pages=(50, 20))
    cluster.submit("big", list(range(60)), 1, new=6)
    for room in range(2, 6):
        cluster.submit(f"r{room}", list(range(40)), room, new=6)
    cluster.decode.turn()
    for engine in (cluster.prefill, cluster.decode):
        engine.now_s = 2000.0
    for room in range(1, 6):
        cluster.wire.room(room).to_decode[0]()
        cluster.wire.room(room).to_decode.popleft()
    cluster.decode.turn()
    late = [rid for rid, finish in cluster.decode.finish.items() if finish.status == 503]
    assert late == ["r2", "r3", "r4", "r5"]
    cluster.run(random.Random(0))
    cluster.assert_all_back()


# By what crosses beside pages, each in so many stories; other combinations: make soak-core.
BESIDE: dict[str, tuple[dict[str, bool], int, dict[str, int]]] = {
    "recurrent states": ({"states": True}, 160, {"sent_states": 500}),
    "pages of a window": ({"windows": True}, 130, {"sent_window_pages": 1000}),
    "states, windows and adapters": (
        {"states": True, "windows": True, "adapters": True},
        150,
        {"sent_states": 500, "sent_window_pages": 1000, "adapters": 500},
    ),
}


@shares
@pytest.mark.parametrize("what", BESIDE)
def test_steps_with(what: str, share: Share) -> None:
    """Whichever side aborts or retracts: decode goes on from the memory of exactly its tokens, and all of it comes back."""
    groups, examples, least = BESIDE[what]
    seen = seen_in(two_role_stories(**groups), examples=share.of(examples))
    share.must_show(seen, {"retractions": 20, "quarantined": 100, "failed_steps": 30, **least})


def seen_in(drawn: SearchStrategy[TwoRoleStory], *, examples: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    every = list(HealthCheck)

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=every)
    @given(story=drawn)
    def drive(story: TwoRoleStory) -> None:
        seen.update(play(story))

    drive()
    return seen


@shares
def test_steps_of_anything_leave_nothing_behind(share: Share) -> None:
    """Fixed examples (derandomized); `make soak-core` draws others."""
    share.must_show(seen_in(two_role_stories(), examples=share.of(150)), LEAST)


@shares
def test_decode_multiplexes_prompts_and_answers(share: Share) -> None:
    """In two lanes of one memory, into which peers write besides."""
    seen = seen_in(stories_of_lanes(), examples=share.of(90))
    share.must_show(seen, {"steps": 5000, "whole_at_decode": 100, "retractions": 20, "quarantined": 50})


def test_decode_skips_requests_whose_adapter_has_no_place() -> None:
    cluster = Cluster(pages=(200, 200), depth=2, rows=8, both={"max_loras_per_batch": 1})
    rng = random.Random(3)
    cluster.submit("a", [9, 9, 1], 1, new=100, adapter=1)
    while "a" not in cluster.decode.tokens:
        cluster.turn(rng)
    for i, (rid, adapter) in enumerate([("b", 2), ("a2", 1), ("model", 0)], 2):
        cluster.submit(rid, [9, 9, i], i, new=4, adapter=adapter)
    cluster.run(rng)
    ends = list(cluster.decode.finish)
    assert ends.index("b") > ends.index("a") and ends.index("model") < ends.index("a")
    assert cluster.decode.tokens["b"] == expected_tokens([9, 9, 2], 4, adapter=2)
    cluster.assert_all_back()
