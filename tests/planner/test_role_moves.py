"""Planned clusters whose workers change pools: nothing is lost on the way, and it pays where needs turn over."""

from dataclasses import replace
from functools import cache

import pytest

from planner.cluster import PlannedCluster
from planner.goodput import SloTargets
from planner.step_time import Fitted
from planner.workload import Lengths, PlannedRequest
from router.config import AutoRolesFlags
from router.pool.worker import Role
from tests.planner.planned import assert_at_rest, cluster, request_at
from tests.planner.role_moves import AutoSpec, Moved, RoleMoves, WorkloadPhase, from_phases

FOREVER = float("inf")
SLOW = Fitted(
    prefill_step_s=0.002,
    prefill_token_s=0.0005,
    prefill_pair_s=0.0,
    decode_step_s=0.02,
    decode_request_s=0.005,
    decode_context_s=0.0,
)
SLO = SloTargets(ttft_s=4.0, tpot_s=0.1, itl_s=None, share=0.9)
AUTO = AutoSpec(
    flags=AutoRolesFlags(
        auto_roles_interval_s=0.5,
        auto_roles_sustain_s=4.0,
        auto_roles_cooldown_s=20.0,
        auto_roles_switch_time_s=4.0,
        auto_roles_ttft_s=2.0,
        auto_roles_itl_s=0.1,
    ),
    switch_s=2.0,
)
# Prompts of 0.4 s, five a second: two workers' work and a little more. Then answers of 40 tokens: 16 a worker within 0.1 s.
DAY = WorkloadPhase(lengths=Lengths(input_len=800, output_len=4), count=400)
NIGHT = WorkloadPhase(lengths=Lengths(input_len=64, output_len=40), count=700, gap=0.5)
RATE = 5.0


def moving(name: str, auto: AutoSpec | None = AUTO) -> tuple[PlannedCluster, list[Moved]]:
    """A cluster and the moves of its workers."""
    planned = cluster(name, step_time=SLOW)
    return planned, RoleMoves(spec=auto, cluster=planned).done if auto else []


def good(name: str, auto: AutoSpec | None = None) -> tuple[int, PlannedCluster, list[Moved]]:
    """Good requests of a day and a night."""
    planned, moves = moving(name, auto)
    records = planned.run(from_phases([DAY, NIGHT], seed=3), rate=RATE, until_s=FOREVER)
    assert [r.error for r in records] == [None] * len(records)
    assert_at_rest(planned)
    return sum(SLO.is_met_by(record) for record in records), planned, moves


@cache
def fixed() -> dict[str, int]:
    return {name: good(name)[0] for name in ("1P3D", "2P2D", "3P1D")}


@pytest.mark.parametrize("start", [pytest.param("1P3D", marks=pytest.mark.slow), "2P2D"])
def test_auto_roles_beat_every_fixed_split_when_needs_turn_over(start: str) -> None:
    """Counts of virtual time: the same on every machine."""
    found, planned, moves = good(start, AUTO)
    assert found > max(fixed().values()), (found, fixed())
    assert found > 1.3 * min(fixed().values())
    towards = [move.to_role for move in moves]
    assert towards[-1] is Role.DECODE and len(towards) <= 5
    assert {role: len(pool) for role, pool in planned.pools.items()} == {"prefill": 1, "decode": 3}


def test_the_right_split_is_left_alone() -> None:
    """Needs that do not turn over: as good as without."""
    requests = from_phases([replace(DAY, count=150)], seed=4)
    answers = []
    for auto in (None, AUTO):
        planned, moves = moving("3P1D", auto)
        answers.append([r.ttft_s for r in planned.run(requests, rate=RATE, until_s=FOREVER)])
        assert moves == []
    assert answers[0] == answers[1]


def test_a_worker_ends_what_it_has_before_it_goes() -> None:
    """Decode is idle but for three long answers, one on each: the worker that prefill gets takes its answer to the end first."""
    requests: list[PlannedRequest] = [request_at(0, 16, 600, block=i) for i in range(3)]
    requests += [request_at(1 + i / 8, 800, 2, block=10 + i) for i in range(100)]
    planned, moves = moving("1P3D")
    records = planned.run(requests, rate=1.0, until_s=FOREVER)
    first = moves[0]
    assert first.to_role is Role.PREFILL
    ended_s = min(r.sent_s + r.e2e_s for r in records[:3] if r.e2e_s is not None)
    assert first.began_s < ended_s, "it had its answer to write still"
    assert first.ended_s >= ended_s + AUTO.switch_s
    assert [r.output_tokens for r in records] == [one.output_len for one in requests]
    assert_at_rest(planned)


def test_workers_report_the_time_that_they_computed() -> None:
    """What the loop counts as busy is what the device was: a step is waited for in the turn that launched it."""
    planned, _ = moving("1P1D")
    planned.run(
        [*(request_at(i / 2, 400, 20, block=i) for i in range(20)), request_at(30, 1, 1)], rate=1.0, until_s=FOREVER
    )
    for worker in planned.workers:
        assert worker.state is not None and worker.executor.busy_s > 1.0
        assert worker.state.counters["busy_s"] == pytest.approx(worker.executor.busy_s, rel=0.02)
