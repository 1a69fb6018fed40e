"""Prefixes that a prefill worker gets from another one: every interleaving a seed can draw, in one thread."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest

from disagg.features.prefix_fetching import (
    ASSUMED_BYTES_A_S,
    LARGE_BYTES,
    MAX_FETCHES,
    MEMORY_S,
    MIN_MEASURED_TOKENS,
    UNMEASURED_WAIT_S,
    FetchPolicy,
)
from disagg.features.prefix_serving import MAX_SERVED
from engine.core.mem_cache.host_cache import HostCache, TierRoom
from tests.core.engine_in_a_test import request_of
from tests.core.hash_model import expected_tokens
from tests.core.mem_cache.tiers_in_a_test import identity
from tests.disagg.prefix_roles import PrefixCluster
from tests.disagg.two_roles import Cluster
from transfer_backends.contract import NO_PREFIXES, RecomputeRequest, Work
from transfer_backends.sides import KVPoll

PROMPT = [i * 7 % 50 for i in range(70)]
PREFIX = (len(PROMPT) - 1) // 4 * 4  # whole pages


def assert_right(
    cluster: PrefixCluster, prompts: dict[str, list[int]], adapters: Mapping[str, int] = MappingProxyType({})
) -> None:
    right = {rid: expected_tokens(p, 4, adapter=adapters.get(rid, 0)) for rid, p in prompts.items()}
    assert cluster.decode.tokens == right
    cluster.assert_all_back()


def computed(cluster: PrefixCluster) -> int:
    """Tokens of prompts that the engine that asks has computed."""
    counters = cluster.prefill.scheduler.counters
    return counters.prompt_tokens - counters.cached_tokens


@dataclass(frozen=True, kw_only=True)
class Case:
    """`warm`: prompts that the source has computed; `own`: what the other has; `fetched`: tokens; `end`: of the fetch."""

    cluster: dict[str, Any] = field(default_factory=dict)
    warm: tuple[list[int], ...] = (PROMPT,)
    own: int = 0
    before: Callable[[PrefixCluster], object] = lambda cluster: None
    known: int = PREFIX
    fetched: int = 0
    end: str = "fetches_refused"
    refused: int = 0  # by the source


CASES = {
    "pages of its own are not sent again": Case(own=20, fetched=PREFIX - 20, end="fetched"),
    "the source has more than a router knows": Case(known=20, fetched=len(PROMPT) // 4 * 4, end="fetched"),
    "and less": Case(warm=(PROMPT[:33],), fetched=32, end="fetched"),
    "the source has another prompt": Case(warm=([1, *PROMPT],), refused=1),
    "the source has evicted most of it": Case(
        cluster={"pages": (24, 200, 200)},
        warm=(PROMPT, [9, *PROMPT[:40]], [8, *PROMPT[:40]]),
        fetched=8,
        end="fetched",
    ),
    "other weights": Case(cluster={"weights": (1, 2)}),
    "the source may take no work": Case(
        before=lambda cluster: cluster.source.role.close_to_peers("it is draining"), refused=1
    ),
    "it costs less to compute": Case(
        before=lambda cluster: cluster.policy.note_prompt(10**9, 1e-3, 0.0), end="fetches_forgone"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_fetched(name: str) -> None:
    case = CASES[name]
    cluster, prompts = PrefixCluster(**case.cluster), {"a": PROMPT}
    for prompt in case.warm:
        cluster.warm(prompt)
    case.before(cluster)
    if case.own:
        prompts["own"] = PROMPT[: case.own]
        cluster.submit("own", prompts["own"], 1, new=4)
        cluster.run(random.Random(1))
    cluster.ask("a", PROMPT, 2, known=case.known)
    cluster.run(random.Random(2))
    assert_right(cluster, prompts)
    assert cluster.counter("prefix_fetched_tokens") == case.fetched and cluster.counter(f"prefix_{case.end}") == 1
    assert computed(cluster) == len(PROMPT) - case.fetched
    assert cluster.source.role.counters()["prefixes_refused"] == case.refused


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_prefix_that_the_other_worker_has_is_not_computed(seed: int, depth: int) -> None:
    cluster = PrefixCluster(both={"depth": depth, "lag": True}, of_source={"depth": depth, "lag": True})
    cluster.warm(PROMPT)
    cluster.ask("a", PROMPT, 1, known=PREFIX)
    cluster.run(random.Random(seed))
    assert_right(cluster, {"a": PROMPT})
    assert computed(cluster) == len(PROMPT) - PREFIX
    assert cluster.counter("prefix_fetched_tokens") == PREFIX
    assert cluster.source.role.counters()["prefixes_sent"] == 1


def test_two_with_one_prefix_wait_for_one_fetch() -> None:
    cluster = PrefixCluster()
    cluster.warm(PROMPT)
    prompts = {"a": PROMPT, "b": [*PROMPT[:-1], 3], "c": [*PROMPT[:-1], 4]}
    cluster.ask("a", prompts["a"], 1, known=PREFIX)
    cluster.ask("b", prompts["b"], 2, known=PREFIX)
    cluster.submit("c", prompts["c"], 3, new=4)  # its router believes that the prefix is here
    cluster.run(random.Random(4))
    assert_right(cluster, prompts)
    assert cluster.counter("prefix_fetches") == 1 and computed(cluster) == 3 * (len(PROMPT) - PREFIX)


def test_others_compute_while_one_waits() -> None:
    cluster = PrefixCluster()
    cluster.warm(PROMPT)
    cluster.ask("waits", PROMPT, 1, known=PREFIX)
    cluster.submit("other", PROMPT[5:40], 2, new=4)
    rng = random.Random(5)
    while "other" not in cluster.decode.finish:
        cluster.wire.step(rng)
        cluster.prefill.turn()
        cluster.decode.turn()
    assert cluster.prefill.scheduler.stages.waiting["waits"].arriving
    cluster.run(rng)
    assert_right(cluster, {"waits": PROMPT, "other": PROMPT[5:40]})


def late(cluster: PrefixCluster, rng: random.Random, *, events: int) -> None:
    """Let `events` of the prefix wire happen, and then a long time pass."""
    for _ in range(events):
        cluster.prefill.turn()
        cluster.source.turn()
        cluster.prefix_wire.step(rng)
    cluster.prefill.now_s = 100.0


@pytest.mark.parametrize("events", range(0, 26, 2))
def test_a_late_fetch_is_given_up_and_its_late_writes_harm_no_request(events: int) -> None:
    """Its pages stay in quarantine while the source may write them; the request computes, and so do others in all of the memory."""
    cluster = PrefixCluster(pages=(200, 40, 200))
    cluster.warm(PROMPT)
    rng = random.Random(events)
    cluster.ask("a", PROMPT, 1, known=PREFIX)
    late(cluster, rng, events=events)
    cluster.prefill.turn()
    assert not cluster.prefill.role.queues()["fetching"], "nothing waits any more"
    prompts = {"a": PROMPT} | {f"o{i}": [i, *PROMPT[: 30 + i]] for i in range(6)}
    for i in range(6):
        cluster.submit(f"o{i}", prompts[f"o{i}"], 10 + i, new=4)
    for _ in range(60):  # late writes land while others compute
        cluster.prefill.turn()
        cluster.decode.turn()
        cluster.wire.step(rng)
    cluster.run(rng)
    assert_right(cluster, prompts)
    assert cluster.counter("prefix_fetches_late") + cluster.counter("prefix_fetched") == 1


@pytest.mark.parametrize("seed", range(12))
def test_a_client_that_leaves_ends_the_fetch_for_it_alone(seed: int) -> None:
    cluster = PrefixCluster()
    cluster.warm(PROMPT)
    rng = random.Random(seed)
    cluster.ask("gone", PROMPT, 1, known=PREFIX)
    others = {"b": [*PROMPT[:-1], 3]} if seed % 2 else {}
    for rid, prompt in others.items():
        cluster.ask(rid, prompt, 2, known=PREFIX)
    for _ in range(seed):
        cluster.step(rng)
    cluster.prefill.abort("gone")
    cluster.decode.abort("gone")
    cluster.run(rng)
    cluster.assert_all_back()
    assert {rid: cluster.decode.tokens[rid] for rid in others} == {r: expected_tokens(p, 4) for r, p in others.items()}
    if others:
        assert cluster.counter("prefix_fetched") == 1


def test_a_prompt_that_decode_gives_up_ends_its_fetch() -> None:
    cluster = PrefixCluster()
    cluster.warm(PROMPT)
    cluster.ask("gone", PROMPT, 1, known=PREFIX)
    cluster.decode.abort("gone")
    rng = random.Random(1)
    while "gone" not in cluster.prefill.finish:  # the source answers nothing in this time
        cluster.wire.step(rng)
        cluster.prefill.turn()
    assert (cluster.counter("prefix_fetches"), cluster.counter("prefix_fetches_aborted")) == (1, 1)
    cluster.run(rng)
    cluster.assert_all_back()


def test_a_source_that_dies_is_no_fault_of_the_request() -> None:
    cluster = PrefixCluster()
    cluster.warm(PROMPT)
    cluster.ask("a", PROMPT, 1, known=PREFIX)
    rng = random.Random(6)
    late(cluster, rng, events=8)
    for room in cluster.prefix_wire.rooms.values():  # as the manager tells it: proven dead, nothing can be written
        assert room.decode is not None
        room.decode.state, room.decode.reason, room.decode.settled = KVPoll.Failed, "the source is dead", True
        room.to_decode.clear(), room.to_prefill.clear(), room.writes.clear()
    for _ in range(2000):
        cluster.wire.step(rng)
        cluster.prefill.turn()
        cluster.decode.turn()
    assert cluster.decode.tokens == {"a": expected_tokens(PROMPT, 4)}
    assert not cluster.prefill.scheduler.memory.allocator.counts()["quarantined"]
    cluster.prefill.role.check()


def test_what_leaves_is_locked_until_nothing_reads_it() -> None:
    """The source evicts for others meanwhile, but not what it sends, although that was used least recently."""
    cluster = PrefixCluster(pages=(34, 200, 200))
    other = [9, *PROMPT[:58]]
    cluster.warm(PROMPT)
    cluster.warm(other)
    cluster.ask("a", PROMPT, 1, known=PREFIX)
    rng = random.Random(7)
    while not cluster.source.role.queues()["sending"]:
        cluster.prefill.turn()
        cluster.source.turn()
        cluster.prefix_wire.step(rng)
    cluster.warm(other)
    cluster.warm([8, *PROMPT[:54]])
    cache = cluster.source.scheduler.memory.cache
    assert cache.num_cached(PROMPT) == len(PROMPT) // 4 and cache.num_cached(other) < len(other) // 4
    cluster.run(rng)
    assert_right(cluster, {"a": PROMPT})
    assert cluster.counter("prefix_fetched_tokens") == PREFIX


@pytest.mark.parametrize("seed", range(6))
def test_what_the_source_still_computes_is_not_sent(seed: int) -> None:
    """Of a prompt in chunks it sends those that are done."""
    cluster, rng = PrefixCluster(of_source={"depth": 2, "lag": True}), random.Random(seed)
    cluster.source.say(cluster.source.role.add(request_of(PROMPT, rid="w", max_new_tokens=1, alone=True), 0.0))
    cluster.source.turns(3 + seed % 3)
    cluster.ask("a", PROMPT, 1, known=8)
    for _ in range(9):  # it answers at once, and no step ends
        cluster.prefill.turn()
        cluster.source.role.poll(0.0)
        cluster.prefix_wire.step(rng)
    cluster.run(rng)
    assert_right(cluster, {"a": PROMPT})
    assert 0 < cluster.counter("prefix_fetched_tokens") < PREFIX


def test_namespaces_do_not_mix() -> None:
    cluster = PrefixCluster()
    cluster.warm(PROMPT, namespace=("theirs",))
    cluster.ask("a", PROMPT, 1, known=PREFIX, namespace=("ours",))
    cluster.ask("b", PROMPT, 2, known=PREFIX, namespace=("theirs",))
    cluster.run(random.Random(9))
    assert_right(cluster, {"a": PROMPT, "b": PROMPT})
    assert cluster.counter("prefix_fetched") == cluster.counter("prefix_fetches_refused") == 1


@pytest.mark.parametrize("warm", [0, 1000])
def test_kv_comes_from_a_worker_with_the_same_adapter_alone(warm: int) -> None:
    """Other weights may have its name."""
    loras = {"max_loras_per_batch": 2}
    cluster = PrefixCluster(both=loras, of_source=loras)
    cluster.warm(PROMPT, adapter=warm)
    adapters = {"base": 0, "one": 1000, "other": 2000}
    for room, (rid, adapter) in enumerate(adapters.items(), 1):
        cluster.ask(rid, PROMPT, room, known=PREFIX, adapter=adapter)
    cluster.run(random.Random(9))
    assert_right(cluster, dict.fromkeys(adapters, PROMPT), adapters)
    assert cluster.counter("prefix_fetched") == 1 and cluster.counter("prefix_fetches_refused") == 2
    assert computed(cluster) == 3 * len(PROMPT) - PREFIX


def test_both_sides_bound_their_number() -> None:
    cluster = PrefixCluster(pages=(900, 900, 900), both={"max_queued": 99})
    prompts = {f"r{i}": [i, *PROMPT] for i in range(MAX_FETCHES + 2)}
    for prompt in prompts.values():
        cluster.warm(prompt)
    for i, (rid, prompt) in enumerate(prompts.items()):
        cluster.ask(rid, prompt, 1 + i, known=PREFIX)
    assert cluster.prefill.role.queues()["fetching"] == MAX_FETCHES and cluster.counter("prefix_fetches_forgone") == 2
    rng = random.Random(11)
    for _ in range(200):  # all of them arrive before the source looks
        cluster.prefill.turn()
        cluster.prefix_wire.step(rng)
    cluster.source.turn()
    told = cluster.source.role.counters()
    assert cluster.source.role.queues()["sending"] == MAX_FETCHES, "the refused ones, too, until that is known"
    assert told["prefixes_refused"] == MAX_FETCHES - MAX_SERVED
    cluster.run(rng)
    assert_right(cluster, prompts)
    assert cluster.counter("prefix_fetched") == MAX_SERVED
    assert cluster.counter("prefix_fetches_refused") == MAX_FETCHES - MAX_SERVED


def test_pages_that_still_come_from_the_host_are_not_sent() -> None:
    """The tree has them from the plan of their copy on."""
    tier = HostCache(room=TierRoom(60), identity=identity())
    cluster = PrefixCluster(pages=(30, 200, 200), of_source={"host": tier, "lag": True, "depth": 2})
    cluster.warm(PROMPT)
    for first in range(3):
        cluster.warm([60 + first, *PROMPT[:50]])
    assert cluster.source.scheduler.memory.cache.num_cached(PROMPT) < PREFIX // 4, "nothing was evicted"
    again = request_of(PROMPT, rid="again", max_new_tokens=1, alone=True)
    cluster.source.say(cluster.source.role.add(again, 0.0))
    plan = cluster.source.scheduler.schedule()
    assert plan is not None and plan.from_host
    cluster.source.launch(plan)  # the device comes to it later
    cluster.ask("a", PROMPT, 1, known=PREFIX)
    for _ in range(60):
        cluster.prefill.turn()
        cluster.source.role.poll(0.0)
        cluster.prefix_wire.step(random.Random(0))
    assert cluster.source.role.queues()["sending"] and not cluster.counter("prefix_fetched")
    cluster.run(random.Random(13))
    assert_right(cluster, {"a": PROMPT})
    assert cluster.counter("prefix_fetched_tokens") == PREFIX


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_host_tier_and_prefixes_of_others_go_together(seed: int, policy: str) -> None:
    """Pages whose copy to the host has not run are not written by others, and pages whose copy from there has not are not sent."""

    def tier() -> HostCache:
        return HostCache(room=TierRoom(60), identity=identity(), write_policy=policy)

    lag, loras = {"lag": True, "depth": 2}, {"max_loras_per_batch": 1}
    tiers = {"prefill": {"host": tier(), **lag}, "of_source": {"host": tier(), **lag, **loras}}
    cluster = PrefixCluster(pages=(26, 30, 200), both=loras, **tiers)
    rng = random.Random(seed)
    prompts = {f"r{i}": [i % 3, *PROMPT[: 40 + i]] for i in range(9)}
    adapters = {f"r{i}": 1000 * (i % 2) for i in range(9)}
    for rid, prompt in prompts.items():
        cluster.warm(prompt, adapter=adapters[rid])
    for i, (rid, prompt) in enumerate(prompts.items()):
        cluster.ask(rid, prompt, 1 + i, known=len(prompt) // 4 * 4, adapter=adapters[rid])
        for _ in range(rng.randrange(40)):
            cluster.step(rng)
    cluster.run(rng)
    assert_right(cluster, prompts, adapters)
    assert cluster.counter("prefix_fetched") > 0


def test_a_worker_without_the_flag_sends_nothing() -> None:
    cluster = Cluster(pages=(99, 99))
    cluster.wire.recompute_requests.append(RecomputeRequest(7, 1, Work(tokens=PROMPT, cached=True)))
    room = cluster.wire.room(7, 1)
    cluster.prefill.turn()
    assert room.prefill is not None and room.prefill.reason == NO_PREFIXES
    assert cluster.prefill.role.counters()["recompute_refused"] == 1


# ---- the decision


def test_what_is_not_measured_is_fetched() -> None:
    policy = FetchPolicy(token_bytes=1000)
    assert policy.wait_s(1000, 0.0) == UNMEASURED_WAIT_S


@pytest.mark.parametrize(("tokens_a_s", "fetched"), [(900.0, True), (1100.0, False)])
def test_the_faster_way_is_taken(tokens_a_s: float, fetched: bool) -> None:
    """KV of 1000 tokens takes a second."""
    policy = FetchPolicy(token_bytes=LARGE_BYTES / 1000)
    policy.note_fetch(1, 1e-6, 0.0)  # there is no latency
    policy.note_fetch(4000, 4.0, 0.0)
    policy.note_prompt(2000, 2000 / tokens_a_s, 0.0)
    wait_s = policy.wait_s(500, 0.0)
    assert (wait_s is not None) is fetched
    if wait_s is not None:
        assert 500 / tokens_a_s < wait_s < 2 * 500 / tokens_a_s, "at worst it takes twice as long"


def test_a_slow_link_gets_another_try_and_a_short_prompt_measures_nothing() -> None:
    policy = FetchPolicy(token_bytes=ASSUMED_BYTES_A_S / 1e6)
    assert 10_000 * ASSUMED_BYTES_A_S / 1e6 > LARGE_BYTES
    policy.note_prompt(MIN_MEASURED_TOKENS - 1, 100.0, 0.0)
    assert policy.compute_s(1, 0.0) is None
    policy.note_prompt(10_000, 1.0, 0.0)
    policy.note_fetch(10_000, 100.0, 0.0)
    assert policy.wait_s(10_000, MEMORY_S) is None
    assert policy.wait_s(10_000, MEMORY_S + 1) is not None


def test_a_prompt_is_judged_by_those_of_its_length() -> None:
    policy = FetchPolicy(token_bytes=1)
    policy.note_prompt(1000, 0.1, 0.0)
    policy.note_prompt(30_000, 30.0, 0.0)
    assert policy.compute_s(600, 0.0) == pytest.approx(0.06) and policy.compute_s(20_000, 0.0) == pytest.approx(20.0)
    assert policy.compute_s(4000, 0.0) == pytest.approx(0.4) and policy.compute_s(60_000, 0.0) == pytest.approx(60.0)


def test_small_fetches_measure_latency_and_large_ones_bandwidth() -> None:
    policy = FetchPolicy(token_bytes=LARGE_BYTES / 1000)
    policy.note_prompt(1000, 0.1, 0.0)
    for _ in range(9):
        policy.note_fetch(30, 0.03, 0.0)  # a hundredth of the bandwidth, if that were all
    assert policy.wait_s(250, 0.0) is None and policy.wait_s(10_000, 0.0) is not None
    policy.note_fetch(10_000, 1.03, 0.0)
    assert policy.fetch_s(10_000, 0.0) == pytest.approx(1.03)
    assert policy.gauges(0.0)["prefix_fetch_gb_s"] == pytest.approx(LARGE_BYTES * 10 / 1e9)
