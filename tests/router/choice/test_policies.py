"""Which worker gets the next request: every policy on literals, and what holds of them for any input."""

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.body import Api, parse_body
from router.choice.policies import (
    CacheAware,
    Chooser,
    ConsistentHashing,
    LeastLoad,
    Placement,
    Policy,
    PowerOfTwo,
    RoundRobin,
    RoutingHints,
    cost_tokens,
    make_chooser,
    session_of,
)
from router.choice.prefix_index import PrefixIndex, chain
from router.config import POLICIES, ChoiceFlags, RouterConfig
from router.pool.breaker import Check
from router.pool.worker import LoadReport, Pool, Role
from service.kv_events import BLOCK_BYTES, BLOCK_TOKENS
from tests.router.dummies import depths, no_draw, table_of

ANY = RoutingHints()


def _choose(policy: Policy, pool: Pool, hints: RoutingHints) -> Placement:
    policy.note(choice := policy.look(pool, hints), hints)
    return choice


def workers_of(count: int, *, role: Role = Role.DECODE) -> Pool:
    return table_of(count, role=role).workers()


@pytest.mark.parametrize(("role", "expected"), [(Role.DECODE, 1), (Role.UNIFIED, 1), (Role.PREFILL, 0)])
def test_workers_that_hold_kv_are_compared_by_the_share_of_it(role: Role, expected: int) -> None:
    table = table_of(2, role=role)
    for worker, capacity, tokens in zip(table.workers(), (1000, 8000), (500, 2000), strict=True):
        table.loads.on_report(worker, LoadReport(capacity_tokens=capacity))
        table.loads.charge(worker, tokens)
    assert _choose(LeastLoad(no_draw), table.workers(), ANY).worker.worker_id == expected
    table.loads.on_report(table.workers()[1], None)  # one that does not say: tokens again
    assert _choose(LeastLoad(no_draw), table.workers(), ANY).worker.worker_id == 0


def test_round_robin_skips_no_one_when_workers_come_and_go() -> None:
    table, policy = table_of(3), RoundRobin(no_draw)
    seen = [_choose(policy, table.workers(), ANY).worker.worker_id for _ in range(4)]
    table.remove("http://h1:1")
    seen += [_choose(policy, table.workers(), ANY).worker.worker_id for _ in range(3)]
    assert seen == [0, 1, 2, 0, 2, 0, 2]


def test_power_of_two_takes_the_less_loaded_of_two_different_ones() -> None:
    table = table_of(3)
    workers = table.workers()
    table.loads.charge(workers[0], 5)
    table.loads.charge(workers[1], 1)
    for first in range(3):
        for second in range(2):
            draws = iter((first, second))
            pair = {first, second + (second >= first)}
            assert len(pair) == 2
            chosen = _choose(PowerOfTwo(lambda n, draws=draws: next(draws)), workers, ANY).worker  # type: ignore[misc]
            assert chosen.worker_id == (2 if 2 in pair else 1)
    assert _choose(PowerOfTwo(lambda n: 1 // 0), workers[:1], ANY).worker is workers[0]


def sessions(count: int) -> list[RoutingHints]:
    return [RoutingHints(session=f"s{i}") for i in range(count)]


@settings(max_examples=30)
@given(st.integers(2, 24), st.data())
def test_a_worker_that_leaves_moves_its_own_sessions_only_and_one_that_joins_takes_its_share(
    count: int, data: st.DataObject
) -> None:
    policy, workers = ConsistentHashing(no_draw), workers_of(count)
    gone = workers[data.draw(st.integers(0, count - 1))]
    asks, left = sessions(400), [w for w in workers if w is not gone]
    before = [_choose(policy, workers, ask).worker for ask in asks]
    after = [_choose(policy, left, ask).worker for ask in asks]
    assert all(new is old for old, new in zip(before, after, strict=True) if old is not gone)
    moved = sum(old is gone for old in before)
    assert abs(moved - 400 / count) < 5 * (400 / count) ** 0.5  # five sigma of a fair hash
    assert set(after) <= set(workers) - {gone}


def test_sessions_spread_evenly_and_without_one_the_load_decides() -> None:
    table, policy = table_of(8), ConsistentHashing(no_draw)
    counts = Counter(_choose(policy, table.workers(), ask).worker.worker_id for ask in sessions(8000))
    assert all(850 < counts[i] < 1150 for i in range(8)), counts
    table.loads.charge(table.workers()[0], 1)
    assert _choose(policy, table.workers(), ANY).worker.worker_id == 1


def parsed(**fields: Any) -> Any:
    return parse_body(Api.GENERATE, msgspec.json.encode({"text": "hi", **fields}))


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({}, {}, ""),
        ({}, {"user": "u"}, "u"),
        ({}, {"user": "u", "session_params": {"id": "p", "rid": None}}, "p"),
        ({}, {"session_params": {}, "user": "u"}, "u"),
        ({}, {"session_id": 7, "user": "u"}, "7"),
        ({}, {"routing_key": "r", "user": "u"}, "r"),
        ({"X-Session-Id": "h"}, {"session_params": {"id": "p"}}, "h"),
        ({"X-SMG-Routing-Key": "k"}, {"user": "u"}, "k"),
        ({}, {"first_response_id": "r", "previous_response_id": "x"}, "r"),
        ({}, {"first_response_id": "r", "prompt_cache_key": "k"}, "k"),
        ({}, {"user": ["a"], "session_params": {"id": {}}}, ""),
        ({}, {"user": None}, ""),
        ({"X-Session-Id": "x" * 5000}, {}, "x" * 1024),
    ],
)
def test_where_the_session_is_read(headers: dict[str, str], fields: dict[str, Any], expected: str) -> None:
    assert session_of(parsed(**fields), headers) == expected


def keys_of(text: str, blocks: int) -> list[int]:
    return chain(b"", text.encode().ljust(blocks * BLOCK_BYTES, b"."))


def ask_of(keys: list[int], *, tokens: int | None = None) -> RoutingHints:
    return RoutingHints(prompt_tokens=len(keys) * BLOCK_TOKENS + 1 if tokens is None else tokens, keys=keys)


def cache_aware(**flags: Any) -> CacheAware:
    return CacheAware(no_draw, PrefixIndex(max_blocks=100), ChoiceFlags(**flags))


def test_a_prompt_goes_where_its_prefix_is_and_costs_only_the_rest() -> None:
    table, policy = table_of(3, role=Role.PREFILL), cache_aware()
    ask = ask_of(keys_of("a", 4))
    first = _choose(policy, table.workers(), ask)
    assert first == Placement(table.workers()[0], 0) and cost_tokens(first, ask) == 4 * BLOCK_TOKENS + 1
    table.loads.charge(first.worker, 1)  # a little load does not drive it away
    again = _choose(policy, table.workers(), ask_of(keys_of("a", 4)))
    assert again == Placement(first.worker, 4 * BLOCK_TOKENS) and cost_tokens(again, ask) == 1
    assert _choose(policy, table.workers(), ask_of(keys_of("b", 4))).worker is not first.worker


@pytest.mark.parametrize(
    ("short", "long", "ignored"), [(0, 4, False), (0, 5, True), (10, 15, False), (10, 16, True), (9, 14, True)]
)
def test_unequal_queues_beyond_both_thresholds_go_by_load_alone(short: int, long: int, ignored: bool) -> None:
    table = table_of(2, role=Role.PREFILL)
    policy = cache_aware(balance_abs_threshold=4, balance_rel_threshold=1.5)
    ask = ask_of(keys_of("a", 4))
    there = _choose(policy, table.workers(), ask).worker
    other = table.workers()[1 - there.worker_id]
    for worker, count in ((there, long), (other, short)):
        for _ in range(count):
            table.loads.charge(worker, 1 if worker is there else 0)
    assert (_choose(policy, table.workers(), ask).worker is other) == ignored


@pytest.mark.parametrize(("tokens", "matches"), [(8 * BLOCK_TOKENS, True), (8 * BLOCK_TOKENS + 1, False)])
def test_a_match_below_the_threshold_is_none(tokens: int, matches: bool) -> None:
    table, policy = table_of(2, role=Role.PREFILL), cache_aware(cache_threshold=0.5)
    there = _choose(policy, table.workers(), ask_of(keys_of("a", 4))).worker
    table.loads.charge(there, 1)
    assert (policy.look(table.workers(), ask_of(keys_of("a", 4), tokens=tokens)).worker is there) == matches


@pytest.mark.parametrize(("role", "stays"), [(Role.PREFILL, True), (Role.DECODE, False)])
def test_a_prefix_is_worth_its_computation_on_prefill_alone(role: Role, stays: bool) -> None:
    """All have queues. The worker with the prefix holds more than twice its tokens."""
    table, policy = table_of(2, role=role), cache_aware()
    ask = ask_of(keys_of("a", 4))
    there = _choose(policy, table.workers(), ask).worker
    for worker in table.workers():
        table.loads.charge(worker, 1)
    table.loads.charge(there, 10 * BLOCK_TOKENS)
    assert (_choose(policy, table.workers(), ask).worker is there) == stays


def test_a_worker_that_left_or_went_down_is_no_longer_known_to_have_anything() -> None:
    config = RouterConfig(pd_disaggregation=True, prefill_policy="cache_aware")
    chooser = make_chooser(config, draw=random.Random(0).randrange)
    table = table_of(4, role=Role.PREFILL)
    for worker in table.workers():
        table.on_incarnation(worker, "first", checked_s=0.0)
    table.on_gone = chooser.forget
    index = chooser.index
    assert index is not None
    for leave in (
        lambda worker: table.remove(worker.url),
        lambda worker: table.on_incarnation(worker, "another", checked_s=1.0),
        lambda worker: table.on_check(worker, Check.REFUSED, now_s=1.0),
    ):
        ask = ask_of(keys_of("a", 4))
        choice = _choose(chooser.policies[Role.PREFILL], table.pool(Role.PREFILL, ""), ask)
        assert depths(index, ask.keys) == {choice.worker.worker_id: 4}
        leave(choice.worker)
        assert depths(index, ask.keys) == {}
        index.check()


def test_each_role_has_its_policy_and_asks_only_for_what_it_needs() -> None:
    body = parsed(text="x" * 2000, user="u")
    draw = random.Random(0).randrange
    plain = make_chooser(RouterConfig(policy="least_load"), draw=draw).hints_of(body, {})
    assert (plain.keys, plain.session, plain.prompt_tokens) == ((), "", body.prompt_tokens)
    assert RouterConfig().default_policy == "cache_aware"
    assert RouterConfig(pd_disaggregation=True, route="pair").default_policy == "least_load"
    assert RouterConfig(policy="random").default_policy == "random"
    config = RouterConfig(pd_disaggregation=True, prefill_policy="cache_aware", decode_policy="consistent_hashing")
    chooser = make_chooser(config, draw=draw)
    ask = chooser.hints_of(body, {})
    assert (len(ask.keys), ask.session) == (3, "u")
    decodes = workers_of(4)
    expected = _choose(ConsistentHashing(no_draw), decodes, ask).worker
    assert _choose(chooser.policies[Role.DECODE], decodes, ask) == Placement(expected)


@settings(max_examples=25)
@given(st.sampled_from(POLICIES), st.integers(1, 6), st.integers(0, 2**32), st.data())
def test_every_policy_gives_a_candidate_and_no_cost_is_negative(
    name: str, count: int, seed: int, data: st.DataObject
) -> None:
    chooser: Chooser = make_chooser(RouterConfig(policy=name), draw=random.Random(seed).randrange)
    for role in (Role.PREFILL, Role.DECODE):
        table = table_of(count, role=role)
        for _ in range(8):
            blocks, tokens = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 700))
            ask = RoutingHints(prompt_tokens=tokens, keys=keys_of("a", blocks), session=f"{tokens}")
            left_out = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
            candidates = [worker for worker in table.workers() if worker.worker_id not in left_out]
            choice = _choose(chooser.policies[role], candidates, ask)
            assert choice.worker in candidates
            assert cost_tokens(choice, ask) >= 1 and 0 <= choice.cached_tokens < tokens
            table.loads.charge(choice.worker, cost_tokens(choice, ask))
