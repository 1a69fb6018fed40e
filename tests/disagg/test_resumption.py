"""Retracted requests whose KV a prefill worker computes again: in one thread, every interleaving a seed can draw."""

import random

import pytest

from disagg.features.recompute import Bounds, Recomputes, why_not
from engine.core.mem_cache.radix_cache import Branch
from engine.messages import FinishReason
from tests.core.hash_model import VOCAB, expected_tokens
from tests.disagg.two_roles import Cluster, assert_no_output_twice, crowded, part_of, run_retracted_first
from transfer_backends.contract import RecomputeRequest, Work


def assert_right(cluster: Cluster, prompts: dict[str, list[int]], new: int = 24) -> None:
    assert cluster.decode.tokens == {rid: expected_tokens(p, new) for rid, p in prompts.items()}
    assert cluster.prefill.tokens == {rid: expected_tokens(p, 1) for rid, p in prompts.items()}, "prefill said too much"
    assert_no_output_twice(cluster.decode.outputs)
    cluster.assert_all_back()


def resumed(cluster: Cluster) -> tuple[float, float]:
    """(through prefill, by itself), and all of them."""
    counters, own = cluster.decode.role.counters(), cluster.decode.scheduler.counters
    through, computed = counters.get("resumed_through_prefill", 0), own.resumed_computed
    assert through + computed == own.retractions and own.resumed_restored == 0
    return through, computed


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("radix", [True, False])
def test_prefill_computes_what_decode_retracted(depth: int, page_size: int, radix: bool) -> None:
    cluster, prompts = crowded(depth=depth, page_size=page_size, radix=radix)
    run_retracted_first(cluster)
    assert_right(cluster, prompts)
    through, _ = resumed(cluster)
    told = cluster.prefill.role.counters()
    assert told["recomputed"] == through > 0 and told["recomputed_tokens"] > 0


def test_what_prefill_computes_again_stays_in_its_namespace() -> None:
    """Nothing was sent outside of the two, so nothing may be cached outside of them."""
    spaces = ("a",), ("b",)
    cluster, prompts = crowded(namespaces=spaces)
    run_retracted_first(cluster)
    assert_right(cluster, prompts)
    assert resumed(cluster)[0] > 0
    for engine in (cluster.prefill, cluster.decode):
        cache = engine.scheduler.memory.cache
        assert not cache.root.children and cache.num_pages > 0
        for i, prompt in enumerate(prompts.values()):
            own, other = (
                cache.num_cached(prompt, branch=Branch("", space)) for space in (spaces[i % 2], spaces[1 - i % 2])
            )
            assert own >= other == 0


def running(new: int) -> tuple[Cluster, random.Random]:
    """Two requests with the same prompt of 10 tokens: one drew 8 and ended; the other, "long", runs and has drawn `new`."""
    cluster = Cluster(pages=(99, 99), resume_elsewhere=True)
    rng = random.Random(0)
    cluster.submit("short", list(range(10)), 1, new=8)
    cluster.run(rng)
    cluster.submit("long", list(range(10)), 2, new=40)
    while len(cluster.decode.tokens.get("long", [])) < new:
        cluster.turn(rng)
    return cluster, rng


def retract(cluster: Cluster) -> None:
    (request,) = cluster.decode.scheduler.stages.running
    cluster.decode.scheduler._departures.retract(request)


def retracted_after(new: int, *, evict: int) -> tuple[Cluster, list[Work]]:
    cluster, rng = running(new)
    works = list[Work]()
    retract(cluster)
    cluster.decode.scheduler.memory.cache.evict(evict)
    take = cluster.wire.take_recompute_requests

    def take_recompute_requests() -> list[RecomputeRequest]:
        taken = take()
        works.extend(asked.work for asked in taken)
        return taken

    cluster.wire.take_recompute_requests = take_recompute_requests  # type: ignore[method-assign]
    cluster.run(rng)
    assert cluster.decode.tokens["long"] == expected_tokens(list(range(10)), 40)
    cluster.assert_all_back()
    return cluster, works


def test_what_is_still_cached_is_neither_computed_nor_sent() -> None:
    """Of 30 tokens (29 in memory, 7 whole pages) the tree forgets all behind the 4 pages that the short one left."""
    cluster, works = retracted_after(20, evict=1)
    (work,) = works
    assert len(work.tokens) == 29 and work.tokens[:10] == list(range(10))
    room = cluster.wire.room(2, 1)
    assert (room.skip_pages, len(room.dst)) == (4, 4)
    assert cluster.prefill.role.counters()["recomputed_tokens"] == 29 - 8  # its own tree has the prompt's 2 pages


def test_less_than_a_page_is_no_work_for_prefill() -> None:
    cluster, works = retracted_after(20, evict=0)
    assert works == [] and resumed(cluster) == (0, 1)


def test_after_retract_all_decode_computes_by_itself() -> None:
    """Its weights may be others than prefill's by now."""
    cluster, rng = running(20)
    assert cluster.decode.scheduler.retract_all() == 1
    cluster.decode.scheduler.memory.cache.evict(99)
    cluster.run(rng)
    assert cluster.decode.tokens["long"] == expected_tokens(list(range(10)), 40)
    assert resumed(cluster) == (0, 1) and not cluster.wire.room(2, 1).recomputes
    cluster.assert_all_back()


@pytest.mark.parametrize("paused", [False, True])
def test_prefill_refuses_and_decode_computes_it_itself(paused: bool) -> None:
    cluster, prompts = crowded()
    if paused:
        cluster.prefill.role.close_to_peers("generation is paused")
    else:
        part_of(cluster.prefill.role, Recomputes)._bounds = Bounds(vocab_size=VOCAB, context_length=5)
    cluster.run(random.Random(1))
    assert_right(cluster, prompts)
    refused, failed = (cluster.prefill.role.counters()["recompute_refused"], cluster.decode.role.counters())
    assert refused == failed["recompute_failed"] > 0 and resumed(cluster)[0] == 0


def test_a_row_of_another_room_is_not_believed() -> None:
    cluster, prompts = crowded()
    copy_row = cluster.wire.copy_row
    rows = cluster.wire.rows[1]

    def lie(src: int, dst: int) -> None:
        copy_row(src, dst)
        if rows._rows[dst]["first_token"] < 0:  # a recompute's: nothing was drawn
            rows._rows[dst]["room"] += 1

    cluster.wire.copy_row = lie  # type: ignore[method-assign]
    cluster.run(random.Random(1))
    assert_right(cluster, prompts)
    assert resumed(cluster)[0] == 0 and cluster.decode.role.counters()["recompute_failed"] > 0


def test_what_is_asked_is_checked() -> None:
    bounds = Bounds(vocab_size=10, context_length=3)
    assert why_not(Work(tokens=[0, 9]), bounds) is None
    assert "of adapters" in (why_not(Work(tokens=[0], variant="digest"), bounds) or "")
    assert "context of 3" in (why_not(Work(tokens=[1, 2, 3, 4]), bounds) or "")
    for tokens in ([10], [-1], []):
        assert "between 0 and 9" in (why_not(Work(tokens=tokens), bounds) or "")


@pytest.mark.parametrize("seed", range(6))
def test_work_of_peers_ends_at_any_moment_and_decode_computes_itself(seed: int) -> None:
    """As a pause that aborts does it: nothing waits for prefill, and clients hear nothing."""
    cluster, prompts = crowded(depth=2)
    rng, ended = random.Random(seed), 0
    while not cluster.at_rest():
        cluster.wire.step(rng)
        rng.choice((cluster.prefill, cluster.decode)).turn()
        if (
            any(not handover.for_prompt for handover in cluster.prefill.role._prompts.handovers.values())
            and rng.random() < 0.2
        ):  # type: ignore[union-attr]
            cluster.prefill.role.end_peers_work("all requests were aborted")
            ended += 1
    assert_right(cluster, prompts)
    assert ended > 0 and cluster.decode.role.counters()["recompute_failed"] > 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("moves", [0, 2, 4, 6, 9, 14])
def test_a_deadline_ends_a_request_in_any_stage_with_its_own_reason(side: str, moves: int) -> None:
    cluster = Cluster(pages=(99, 99), page_size=4, depth=2, both={"chunk": 4})
    rng, late = random.Random(moves), FinishReason(kind="abort", message="too late", status=504)
    cluster.submit("r", list(range(12)), 1, new=30)
    for _ in range(moves):
        cluster.turn(rng)
    engine = getattr(cluster, side)
    engine.say(engine.role.abort("r", 0.0, late))
    cluster.run(rng)
    was_late = engine.finish["r"] == late
    assert was_late or (side == "prefill" and moves >= 6)  # else it had handed everything over
    assert cluster.decode.finish["r"].kind == ("abort" if was_late else "length")
    cluster.assert_all_back()
