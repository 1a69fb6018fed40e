"""Features of images from an encoder: who encodes what, and that whatever happens to a fetch its prompt gets the right tokens."""

import random
from typing import Any

import pytest

from disagg.features.feature_fetching import AVOIDED_S
from disagg.incoming import rooms_of
from engine.images import ImageInput
from engine.messages import FeatureSource
from tests.core.hash_model import expected_tokens
from tests.core.mem_cache.images import image, read_of
from tests.disagg.features.feature_roles import SOURCE, EncodeCluster


def right(*images: ImageInput, length: int = 20, new: int = 3) -> list[int]:
    return expected_tokens(read_of(*images, length=length), new)


ONE, TWO = image(1, at=2), image(2, at=9, rows=2, columns=4)


Asked = dict[str, tuple[ImageInput, ...]]
# cluster, what is asked, sources by request; images that the encoder and the engine encode, counters
CASES: dict[str, tuple[dict[str, Any], Asked, dict[str, Any], tuple[int, int], dict[str, int]]] = {
    "the encoder encodes": (
        *({}, {"a": (ONE, TWO)}, {}, (2, 0)),
        {"features_fetched": 2, "feature_fetched_tokens": ONE.num_tokens + TWO.num_tokens},
    ),
    "once for all that wait, elsewhere and twice": (
        *({}, {"a": (ONE,), "b": (image(1, at=5), image(1, at=12))}, {}, (1, 0)),
        {"feature_fetches": 1},
    ),
    "no encoder": ({}, {"a": (ONE, TWO), "b": (image(3, at=1),)}, {"a": [None, SOURCE], "b": []}, (1, 2), {}),
    "other weights": ({"weights": (1, 0)}, {"a": (ONE,)}, {}, (1, 1), {"feature_fetches_refused": 1}),
    "larger than the pool": ({"arriving": 1}, {"a": (ONE,)}, {}, (0, 1), {"feature_fetches_forgone": 1}),
    "no room at the encoder": ({"pages": 1}, {"a": (ONE,)}, {}, (0, 1), {"feature_fetches_refused": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_who_encodes_an_image(name: str) -> None:
    given, asked, sources, encoded, counted = CASES[name]
    cluster = EncodeCluster(**given)
    for rid, images in asked.items():
        cluster.ask(rid, *images, sources=sources.get(rid))
    cluster.run()
    assert cluster.engine.tokens == {rid: right(*images) for rid, images in asked.items()}
    assert cluster.encoded() == encoded
    assert {name: cluster.counter(name) for name in counted} == counted
    assert cluster.encoder.role.counters()["features_refused"] == ("pages" in given)
    cluster.assert_all_back()


def test_a_prompt_computes_nothing_before_they_are_here() -> None:
    cluster = EncodeCluster()
    cluster.ask("a", ONE)
    for _ in range(5):
        cluster.engine.turn()
    assert not cluster.engine.plans
    cluster.ask("text", length=7)
    cluster.engine.run()
    assert cluster.engine.tokens == {"text": right(length=7)}, "others do not wait for it"
    cluster.run()
    cluster.assert_all_back()


def test_what_is_here_is_not_fetched() -> None:
    """Features that the engine keeps, and images whose KV is cached."""
    cluster = EncodeCluster(room=14)
    cluster.ask("a", ONE)
    cluster.run()
    cluster.ask("again", image(1, at=5), length=24)
    cluster.run()
    assert cluster.counter("feature_fetches") == 1
    cluster.ask("other", TWO)
    cluster.ask("cached", ONE, length=20, new=5)
    cluster.run()
    assert cluster.counter("feature_fetches") == 2
    assert cluster.engine.tokens["cached"] == right(ONE, new=5)
    cluster.assert_all_back()


def test_an_encoder_that_cannot_be_reached_costs_others_nothing() -> None:
    """For some seconds: then it is asked again."""
    cluster = EncodeCluster()
    cluster.wire.unreachable = True
    cluster.ask("a", ONE)
    cluster.run()
    cluster.wire.unreachable = False
    assert avoided(cluster) == [SOURCE.control], "the router hears of it"
    cluster.ask("b", TWO)
    cluster.run()
    assert cluster.engine.tokens == {"a": right(ONE), "b": right(TWO)}
    assert (cluster.counter("feature_fetches_refused"), cluster.counter("feature_fetches_forgone")) == (1, 1)
    cluster.ask("elsewhere", image(3, at=2), sources=[FeatureSource("127.0.0.1:2", "other")])
    cluster.engine.now_s = AVOIDED_S
    cluster.ask("later", image(4, at=2))
    cluster.run()
    assert cluster.counter("features_fetched") == 2 and avoided(cluster) == []
    cluster.assert_all_back()


def avoided(cluster: EncodeCluster) -> list[str]:
    found: list[str] = cluster.engine.role.state()["avoided_encoders"]
    return found


def test_an_encoder_that_is_late_costs_a_prompt_its_time_alone() -> None:
    """What it still writes then is nobody else's memory, until it has ended."""
    cluster = EncodeCluster(timeout_s=3.0)
    cluster.ask("a", ONE)
    rng = random.Random(1)
    while cluster.fetches.incoming.num_rows == 0:  # its pages are named
        cluster.wire.step(rng)
        cluster.engine.turn()
    cluster.engine.now_s = 2.9
    cluster.engine.turn()
    assert not cluster.engine.plans
    cluster.engine.now_s = 3.0
    cluster.engine.run()
    assert cluster.engine.tokens == {"a": right(ONE)} and cluster.encoded() == (0, 1)
    assert cluster.engine.role.queues()["quarantined_features"] == 1
    assert cluster.fetches.allocator.counts()["quarantined"] == 2
    cluster.ask("b", TWO)
    assert cluster.counter("feature_fetches_late") == cluster.counter("feature_fetches_forgone") == 1
    cluster.run()
    cluster.assert_all_back()


def test_a_client_that_leaves_takes_its_fetch_along() -> None:
    cluster = EncodeCluster()
    cluster.ask("a", ONE)
    cluster.ask("b", ONE, TWO)
    cluster.engine.abort("b")
    assert (cluster.counter("feature_fetches"), cluster.counter("feature_fetches_aborted")) == (2, 1)
    cluster.run()
    assert cluster.engine.tokens["a"] == right(ONE)
    cluster.assert_all_back()


def test_work_of_peers_that_ends_leaves_prompts_their_own_tower() -> None:
    cluster = EncodeCluster()
    cluster.ask("a", ONE)
    cluster.engine.role.end_peers_work("the worker drains")
    cluster.run()
    assert cluster.engine.tokens == {"a": right(ONE)} and cluster.encoded() == (0, 1)
    cluster.assert_all_back()


@pytest.mark.parametrize("side", ["encoder", "engine"])
def test_a_step_without_memory_fails_no_other_prompt(side: str) -> None:
    cluster = EncodeCluster(depth=2)
    model = cluster.encoder.model if side == "encoder" else cluster.engine.model
    model.fails = lambda plan: any(item.rid != "b" and item.start == 0 for item in plan.items) and not again
    again: list[bool] = []
    cluster.ask("a", ONE)
    cluster.run()
    again.append(True)
    cluster.ask("b", ONE)
    cluster.run()
    failed = cluster.engine.finish["a"]
    assert (failed.status == 503) == (side == "engine")
    assert cluster.engine.tokens["b"] == right(ONE)
    assert side == "engine" or cluster.engine.tokens["a"] == right(ONE)
    cluster.assert_all_back()


def test_where_those_in_use_leave_no_room_features_are_dropped() -> None:
    cluster = EncodeCluster(room=8, num_pages=40)
    cluster.ask("busy", TWO, length=20, sources=[None], new=1)
    cluster.engine.turn()
    cluster.engine.turn()  # TWO is encoded, and some of its tokens are still to come
    cluster.ask("a", ONE)
    cluster.run()
    assert cluster.engine.tokens == {"busy": right(TWO, new=1), "a": right(ONE)}
    cluster.assert_all_back()


def test_the_encoder_keeps_what_it_has_encoded() -> None:
    """Until others need the room; the engine has forgotten it."""
    cluster = EncodeCluster(pages=4, room=10)
    for rid, shown in (("a", ONE), ("b", ONE), ("c", TWO), ("d", image(3, at=2)), ("e", ONE)):
        cluster.engine.scheduler.flush_cache()
        cluster.ask(rid, shown)
        cluster.run()
        assert cluster.engine.tokens[rid] == right(shown)
    counters = cluster.encoder.role.counters()
    assert (counters["mm_cache_queries"], counters["mm_cache_hits"], counters["features_sent"]) == (5, 1, 5)
    assert cluster.encoded() == (4, 0)
    cluster.assert_all_back()


def test_weights_that_change_take_no_features_along() -> None:
    """Those that have landed, and no step has copied."""
    cluster = EncodeCluster()
    cluster.ask("a", ONE)
    rng = random.Random(1)
    while not cluster.counter("features_fetched"):
        cluster.wire.step(rng)
        cluster.encoder.turn()
        cluster.engine.role.poll(0.0)
    cluster.engine.scheduler.forget_prefixes()
    cluster.engine.model.weights = 5
    cluster.run()
    expected = cluster.engine.model.features[ONE.key]
    assert cluster.engine.model.encoded_by[ONE.key] == 5 and expected == cluster.engine.model.features_of(ONE)
    cluster.assert_all_back()


@pytest.mark.parametrize("seed", range(16))
def test_whatever_happens_tokens_are_right_and_memory_returns(seed: int) -> None:
    rng = random.Random(seed)
    cluster = EncodeCluster(
        pages=rng.choice((6, 64)),
        arriving=rng.choice((3, 16)),
        room=rng.choice((20, 100)),
        depth=rng.choice((1, 2)),
        timeout_s=rng.choice((5.0, 1e9)),
        num_pages=rng.choice((24, 200)),
        lag=rng.random() < 0.5,
    )
    may_fail = rng.random() < 0.3
    for engine in (cluster.encoder, cluster.engine):
        engine.model.fails = lambda plan: bool(may_fail and plan.items and rng.random() < 0.05)
    asked: dict[str, list[int]] = {}
    for turn in range(400):
        if turn % 10 == 0:
            shown = (image(rng.randrange(1, 7), at=rng.randrange(1, 5)), image(rng.randrange(1, 7), at=12))
            shown = shown[: rng.randrange(1, 3)]
            rid, length = f"r{turn}", rng.randrange(19, 30)
            asked[rid] = right(*shown, length=length, new=4)
            cluster.ask(rid, *shown, length=length, new=4, sources=[rng.choice((SOURCE, SOURCE, None)) for _ in shown])
        if rng.random() < 0.01:
            cluster.engine.abort(rng.choice(list(asked)))
        if rng.random() < 0.02:
            cluster.wire.unreachable = not cluster.wire.unreachable
        cluster.engine.now_s += rng.random() * 0.3
        cluster.step(rng)
    cluster.wire.unreachable = False
    cluster.run(rng)
    for rid, tokens in asked.items():
        end = cluster.engine.finish[rid]
        assert end.kind == "abort" or cluster.engine.tokens[rid] == tokens, rid
        assert end.kind != "abort" or end.status in (0, 503)
    cluster.assert_all_back()


def test_rooms_of_two_workers_differ() -> None:
    one, other = rooms_of("one"), rooms_of("other")
    rooms = [next(rooms) for rooms in (one, other) for _ in range(100)]
    assert len(set(rooms)) == 200 and all(0 < room < 2**63 for room in rooms)
