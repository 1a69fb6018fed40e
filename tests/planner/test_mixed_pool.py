"""Planned clusters with unified workers beside pairs: the router's own choice of ways decides, in virtual time."""

import pytest

from deploy.bench.stats import RequestRecord
from planner.cluster import PlannedCluster
from planner.workload import Lengths, PlannedRequest, from_lengths
from tests.planner.planned import assert_at_rest, cluster, request_at

FOREVER = float("inf")
SHORT, LONG = Lengths(input_len=60, output_len=60, range_ratio=0.5), Lengths(input_len=3000, output_len=20)


def both(count: int) -> list[PlannedRequest]:
    """Nine short prompts for each long one."""
    short, long = from_lengths(SHORT, count=9 * count, seed=1), from_lengths(LONG, count=count, seed=2)
    shifted = [
        PlannedRequest(at=9 * one.at, blocks=((one.blocks[0][0] + 1 << 50, 3000),), output_len=20) for one in long
    ]
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


def test_every_request_is_served_on_one_of_both_ways() -> None:
    planned = cluster("1P1D1U")
    served(planned, both(20), rate=20.0)
    counts = requests_of(planned)
    assert counts["prefill"] == counts["decode"] and counts["prefill"] + counts["unified"] == 200
    assert min(counts.values()) > 20


def test_prefill_workers_get_the_long_prompts() -> None:
    """Where a hand-over is cheap: a prompt holds up the answers at a unified worker."""
    planned = cluster("1P1D1U", link=1 << 34)
    served(planned, both(16), 8.0)
    (prefill,), _, (unified,) = planned.pools().values()
    workers = [planned.routing.workers[one] for one in (prefill, unified)]
    means = [one.report.prompt_tokens_total / one.assigned_total for one in workers if one.report is not None]
    assert means[0] > 2 * means[1], means


@pytest.mark.parametrize(("size", "role"), [(3000, "unified"), (30, "decode")])
def test_what_one_side_cannot_take_overflows_to_the_other(size: int, role: str) -> None:
    """Long prompts at once fill the queue of the only prefill worker; short ones with long answers the only unified one."""
    planned = cluster("1P1D1U")
    served(planned, [request_at(i / 100, size, 200 if size < 100 else 5, block=i) for i in range(60)], rate=1.0)
    assert requests_of(planned)[role] >= 5
