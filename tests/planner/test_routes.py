"""Planned clusters by route: fixed ones, and the router's own price; turns whose prompts hold answers, found again."""

import pytest

from deploy.bench.stats import RequestRecord
from deploy.bench.workload import TraceEntry
from planner.cluster import PlannedCluster
from planner.workload import Lengths, PlannedRequest, from_lengths, from_trace, tokens_of
from tests.planner.planned import OUTSIDE_S, assert_at_rest, cluster, decode_s, prefill_s, request_at

FOREVER = float("inf")
SHORT, LONG = Lengths(input_len=60, output_len=60, range_ratio=0.5), Lengths(input_len=3000, output_len=20)


def both(count: int) -> list[PlannedRequest]:
    """Nine short prompts for each long one."""
    short, long = from_lengths(SHORT, count=9 * count, seed=1), from_lengths(LONG, count=count, seed=2)
    shifted = [PlannedRequest(at=9 * r.at, blocks=((r.blocks[0][0] + 1 << 50, 3000),), output_len=20) for r in long]
    return sorted([*short, *shifted], key=lambda one: one.at)


def requests_of(planned: PlannedCluster) -> dict[str, int]:
    """How many requests each role had."""
    found: dict[str, list[int]] = {}
    for worker, one in planned.routing.workers.items():
        found.setdefault(worker.spec.role, []).append(one.assigned_total)
    return {role: sum(counts) for role, counts in found.items()}


def served(planned: PlannedCluster, requests: list[PlannedRequest], rate: float) -> list[RequestRecord]:
    records = planned.run(requests, rate=rate, until_s=FOREVER)
    assert [r.error for r in records] == [None] * len(records)
    assert [r.output_tokens for r in records] == [one.output_len for one in requests]
    assert_at_rest(planned)
    return records


@pytest.mark.parametrize("name", ["1P1D", "1P1D1U"])
def test_every_request_is_served_by_the_cheapest_route(name: str) -> None:
    planned = cluster(name, route="auto", prefix_fetch=True)
    served(planned, both(20), rate=20.0)
    counts = requests_of(planned)
    assert sum(counts.values()) > 200, "some go to pairs"
    assert sum(count > 5 for count in counts.values()) > 1


@pytest.mark.parametrize("route", ["decode", "prefill"])
def test_a_fixed_route_keeps_requests_at_one_worker(route: str) -> None:
    """No hand-over: the first token comes when the prompt is computed."""
    planned = cluster("1P1D", route=route)
    (record,) = served(planned, [request_at(0, 100, 4)], rate=1.0)
    assert [role for role, count in requests_of(planned).items() if count] == [route]
    assert record.ttft_s == pytest.approx(OUTSIDE_S + prefill_s(100))
    assert record.itl_s == pytest.approx([decode_s(101), decode_s(102), decode_s(103)])


def turns() -> list[PlannedRequest]:
    """The second one comes at once, so waits for the first."""
    first = request_at(0, 640, 641)
    return [first, PlannedRequest(at=0.0, blocks=(*first.answered, (9, 40)), output_len=2, after=0)]


@pytest.mark.parametrize(("name", "route", "fetch", "cached"), [
    ("1U", "auto", False, 1280), ("1P1D", "decode", False, 1280), ("1P1D", "pair", False, 640), ("1P1D", "pair", True, 1280),
])  # fmt: skip
def test_a_later_turn_finds_what_it_can(name: str, route: str, fetch: bool, cached: int) -> None:
    """Whole pages of prompt and answer lie where both were computed; a pair's prefill worker fetches the answer's from decode."""
    planned = cluster(name, route=route, policy="cache_aware", prefix_fetch=fetch, link=1 << 34)
    first, second = served(planned, turns(), rate=1.0)
    assert second.cached_tokens == cached
    assert second.sent_s == pytest.approx(first.sent_s + first.e2e_s, abs=0.01)


def test_a_trace_s_prompt_holds_the_answer_of_the_turn_before() -> None:
    entries = [
        TraceEntry(timestamp_ms=0, input_length=1500, output_length=200, hash_ids=(1, 2, 3)),
        TraceEntry(timestamp_ms=1, input_length=1100, output_length=20, hash_ids=(1, 4, 5)),  # shares a block
        TraceEntry(timestamp_ms=2, input_length=2000, output_length=20, hash_ids=(1, 2, 6, 7)),
    ]
    _, (first, other, second) = from_trace(entries, count=3)
    assert second.after == 0 and second.tokens()[: 1500 + 200] == tokens_of(first.answered)
    assert other.after is None and other.tokens()[:512] == first.tokens()[:512] != other.tokens()[512:1024]
    assert [one.input_len for one in (first, other, second)] == [1500, 1100, 2000]


@pytest.mark.parametrize(("size", "role"), [(3000, "unified"), (30, "decode")])
def test_what_one_side_cannot_take_overflows_to_the_other(size: int, role: str) -> None:
    """Long prompts at once fill the queue of the only prefill worker; short ones with long answers the only unified one."""
    planned = cluster("1P1D1U")
    served(planned, [request_at(i / 100, size, 200 if size < 100 else 5, block=i) for i in range(60)], rate=1.0)
    assert requests_of(planned)[role] >= 5
