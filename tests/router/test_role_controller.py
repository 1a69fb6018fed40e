"""When a worker changes pools: the rule by literals, its promises under any load, and how reports become work."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.config import AutoRolesFlags
from router.pool.worker import LoadReport, Role
from router.roles.controller import Controller, Gauge, Move, Seen, decode_demand
from tests.router.dummies import table_of

P, D = Role.PREFILL, Role.DECODE
FLAGS = AutoRolesFlags(auto_roles_sustain_s=10.0, auto_roles_cooldown_s=60.0, auto_roles_switch_time_s=20.0)
AT_ONCE = replace(FLAGS, auto_roles_sustain_s=0.0, auto_roles_switch_time_s=0.0)


def seen_of(worker_id: int, role: Role, demand: float, backlog: float = 0.0, *, model: str = "m") -> Seen:
    return Seen(worker_id=worker_id, role=role, model=model, ready=True, demand=demand, backlog=backlog)


class Pools:
    """Workers of one model whose roles follow the moves; work is dealt out evenly."""

    def __init__(self, prefill: int, decode: int, flags: AutoRolesFlags = FLAGS) -> None:
        self.roles = [P] * prefill + [D] * decode
        self.controller = Controller(flags)
        self.moves: list[tuple[float, Move]] = []
        self.now_s = 0.0

    def size(self, role: Role) -> int:
        return self.roles.count(role)

    def look(self, prefill: float, decode: float, *, backlog: float = 0.0, absent: bool = False) -> Move | None:
        """One second later. Work in workers; `backlog` of prefill."""
        self.now_s += 1.0
        work = {P: (prefill + backlog) / self.size(P), D: decode / self.size(D)}
        late = {P: backlog / self.size(P), D: 0.0}
        seen = [seen_of(i, role, work[role], late[role]) for i, role in enumerate(self.roles)]
        moves = self.controller.tick(self.now_s, [replace(seen[0], ready=not absent), *seen[1:]])
        assert len(moves) <= 1
        self.moves += [(self.now_s, move) for move in moves]
        return moves[0] if moves else None

    def carry_out(self, move: Move, *, took_s: float = 20.0, ok: bool = True) -> None:
        self.now_s += took_s
        if ok:
            self.roles[move.worker_id] = move.to_role
        self.controller.ended(move, ok=ok, now_s=self.now_s)

    def until_move(self, prefill: float, decode: float, *, backlog: float = 0.0, looks: int = 150) -> Move | None:
        return next((m for _ in range(looks) if (m := self.look(prefill, decode, backlog=backlog))), None)

    @property
    def verdict(self) -> str:
        return self.controller.standings["m"].verdict


def test_a_short_pool_gets_a_worker_after_as_long_as_a_move_takes() -> None:
    pools = Pools(1, 3)
    move = pools.until_move(1.5, 0.6)
    assert move is not None and move.to_role is P and pools.now_s == 1 + FLAGS.auto_roles_switch_time_s
    assert "prefill is short since 20 s: pressure 1.50" in move.reason


def test_a_burst_that_is_over_sooner_moves_no_worker() -> None:
    pools = Pools(1, 3)
    for _ in range(20):
        assert pools.until_move(1.5, 0.6, looks=19) is None
        assert pools.look(0.2, 0.6) is None


def test_between_the_thresholds_a_shortage_goes_on_but_begins_nothing() -> None:
    pools = Pools(2, 2)
    assert pools.until_move(1.6, 0.2) is None and pools.verdict == "neither pool is short"
    assert pools.look(1.9, 0.2) is None
    assert pools.until_move(1.6, 0.2) is None
    move = pools.look(1.9, 0.2)
    assert move is not None and move.to_role is P, "it was short all the time"


def test_the_measured_time_of_moves_is_waited_for() -> None:
    pools = Pools(1, 7)
    for took_s in (200.0, 200.0):
        move = pools.until_move(6.0, 0.5)
        assert move is not None
        pools.carry_out(move, took_s=took_s)
    began_s = pools.now_s
    assert pools.until_move(6.0, 0.5, looks=200) is not None
    assert pools.now_s - began_s == pytest.approx(1 + 155)  # 20, then halfway to 200, and again


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (1.9, 1.9, "prefill is short, but decode cannot spare a worker"),
        (1.5, 1.9, "decode is short, but prefill cannot"),
    ],
)
def test_no_worker_moves_if_the_other_pool_would_suffer_as_much(prefill: float, decode: float, said: str) -> None:
    pools = Pools(2, 2)
    assert pools.until_move(prefill, decode) is None and said in pools.verdict


def test_a_backlog_makes_a_pool_short_but_takes_no_worker_from_one_that_needs_it() -> None:
    """A long prompt holds prefill up; decode starves for a while, and looks as if it could spare one."""
    pools = Pools(2, 2)
    assert pools.until_move(1.6, 1.4, looks=100) is None
    assert pools.until_move(1.6, 0.5, backlog=4.0, looks=40) is None
    assert "cannot spare" in pools.verdict
    assert Pools(2, 2).until_move(1.6, 0.5, backlog=4.0, looks=40) is not None, "if it never had more"


def test_the_least_loaded_worker_moves_and_of_equal_ones_the_oldest() -> None:
    controller = Controller(AT_ONCE)
    work = {4: 0.3, 3: 0.1, 2: 0.1}
    (move,) = controller.tick(0.0, [*(seen_of(i, D, demand) for i, demand in work.items()), seen_of(9, P, 2.0)])
    assert move.worker_id == 2


def test_no_worker_moves_while_another_is_away_or_moves() -> None:
    pools = Pools(1, 3)
    for _ in range(100):
        assert pools.look(1.5, 0.6, absent=True) is None
    assert "1 of 4 workers are down" in pools.verdict
    move = pools.until_move(1.5, 0.6)
    assert move is not None and pools.now_s == 100 + 1 + FLAGS.auto_roles_switch_time_s, (
        "what was seen before does not count"
    )
    assert pools.until_move(1.5, 0.6) is None and pools.verdict == "a worker moves to prefill"


def test_an_empty_pool_is_not_filled() -> None:
    """Who starts a cluster in pieces must not find its roles changed."""
    controller = Controller(FLAGS)
    for now_s in range(100):
        assert not controller.tick(now_s, [seen_of(1, D, 0.0)] * 2)
    assert controller.standings["m"].verdict == "there is no prefill worker"


def test_a_failed_move_is_not_tried_again_at_once() -> None:
    pools = Pools(1, 3)
    move = pools.until_move(1.5, 0.6)
    assert move is not None
    pools.carry_out(move, ok=False)
    failed_s = pools.now_s
    assert pools.until_move(1.5, 0.6) is not None and pools.now_s >= failed_s + FLAGS.auto_roles_cooldown_s


def test_models_have_pools_of_their_own() -> None:
    controller = Controller(AT_ONCE)
    seen = []
    for number, model in enumerate(("a", "b", "c")):
        for role, work in ((P, 0.2 if model == "c" else 2.0), (D, 0.1), (D, 0.1)):
            seen.append(seen_of(len(seen) + 10 * number, role, work, model=model))
    assert [move.model for move in controller.tick(0.0, seen)] == ["a", "b"]
    assert [move.model for move in controller.tick(1.0, [s for s in seen if s.model == "c"])] == []
    assert sorted(controller.standings) == ["a", "b", "c"], "a model that moves is not forgotten"


works = st.floats(0.0, 8.0)
sizes = st.integers(1, 6)


@settings(max_examples=50)
@given(
    sizes,
    sizes,
    st.integers(1, 2),
    st.integers(1, 2),
    st.lists(st.tuples(works, works, works, st.integers(1, 90), st.booleans()), max_size=25),
)
def test_no_worker_goes_back_soon_and_minimums_hold_under_any_load(
    prefill: int, decode: int, min_prefill: int, min_decode: int, series: list[tuple[float, float, float, int, bool]]
) -> None:
    pools = Pools(prefill, decode, replace(FLAGS, auto_roles_min_prefill=min_prefill, auto_roles_min_decode=min_decode))
    floor = {P: min(prefill, min_prefill), D: min(decode, min_decode)}
    ended: list[tuple[float, Role]] = []
    for of_prefill, of_decode, backlog, seconds, ok in series:
        for _ in range(seconds):
            move = pools.look(of_prefill, of_decode, backlog=backlog)
            if move is None:
                continue
            if ended and ended[-1][1] is not move.to_role:
                assert pools.now_s >= ended[-1][0] + FLAGS.auto_roles_cooldown_s, "it went back within the cool-down"
            pools.carry_out(move, ok=ok)
            if ok:
                ended.append((pools.now_s, move.to_role))
            assert all(pools.size(role) >= least for role, least in floor.items())


@settings(max_examples=50)
@given(sizes, sizes, works, works, works)
@example(1, 2, 0.0, 0.0, 1.0)  # nothing but a backlog
def test_under_constant_work_moves_end(prefill: int, decode: int, of_p: float, of_d: float, backlog: float) -> None:
    """Each lowers the worse lasting pressure, so that no split comes back."""
    pools, splits = Pools(prefill, decode), [prefill]
    worst = max(of_p / prefill, of_d / decode)
    while (move := pools.until_move(of_p, of_d, backlog=backlog)) is not None:
        pools.carry_out(move)
        now = max(of_p / pools.size(P), of_d / pools.size(D))
        assert now < worst and pools.size(P) not in splits
        worst = now
        splits.append(pools.size(P))
    assert len(pools.moves) < prefill + decode


QUICK = AutoRolesFlags(auto_roles_ttft_s=2.0, auto_roles_sustain_s=3.0)  # smoothed over a second


def test_prefill_work_is_what_comes_in_and_what_waits_at_the_speed_it_has() -> None:
    """10,000 tokens a second come to a worker that computes 20,000, and is busy half of the time: half a worker. Then no less
    comes in, and 40,000 tokens wait: two seconds of its time, one goal's worth."""
    made = table_of(roles=(P,))
    (worker,) = made.workers()
    gauge = Gauge(QUICK)
    for second in range(60):
        report = LoadReport(prompt_tokens_total=10_000 * second, busy_ms_total=500 * second)
        made.loads.on_report(worker, report)
        (seen,) = gauge.read([worker], float(second))
        assert seen.ready is (second > 0)
    assert seen.lasting == pytest.approx(0.5) and seen.backlog == 0
    made.loads.on_report(
        worker, replace(report, waiting_tokens=40_000, prompt_tokens_total=640_000, busy_ms_total=30_000)
    )
    (seen,) = gauge.read([worker], 60.0)
    assert 0.5 < seen.backlog < 1.0
    for second in range(61, 90):
        busy_ms, arrived = 30_000 + 500 * (second - 60), 640_000 + 10_000 * (second - 60)
        made.loads.on_report(
            worker, LoadReport(prompt_tokens_total=arrived, busy_ms_total=busy_ms, waiting_tokens=40_000)
        )
        (seen,) = gauge.read([worker], float(second))
    assert seen.backlog == pytest.approx(1.0, rel=0.1)


def test_memory_that_waits_for_prefill_is_no_work_of_decode() -> None:
    """3 of 4 requests that have memory wait for their KV, and so does what waits for that memory, by as much."""
    held = {"used_tokens": 8000, "pending_tokens": 4000, "capacity_tokens": 10_000}
    report = LoadReport(running_reqs=5, stages={"transfer": 15, "prealloc": 4}, **held)
    demand, blocked = decode_demand(report, QUICK, gap_s=None)
    assert demand == pytest.approx(0.25 * 12_000 / 10_000) and blocked == pytest.approx(3000)
    alone, _ = decode_demand(replace(report, stages={"prealloc": 4}), QUICK, gap_s=None)
    assert alone == pytest.approx(1.2)


def test_decode_work_is_the_most_of_kv_requests_and_time_between_tokens() -> None:
    report = LoadReport(running_reqs=30, used_tokens=1000, capacity_tokens=10_000)
    assert decode_demand(report, QUICK, gap_s=0.04)[0] == pytest.approx(0.1)
    assert decode_demand(replace(report, max_running_reqs=40), QUICK, gap_s=0.04)[0] == pytest.approx(0.75)
    assert decode_demand(report, replace(QUICK, auto_roles_itl_s=0.05), gap_s=0.04)[0] == pytest.approx(0.8)


def test_time_between_tokens_follows_from_what_came_out() -> None:
    """20 requests, 500 tokens a second: each gets one in 40 ms."""
    made = table_of(roles=(D,))
    (worker,) = made.workers()
    gauge = Gauge(replace(QUICK, auto_roles_itl_s=0.05))
    for second in range(3):
        made.loads.on_report(
            worker, LoadReport(running_reqs=20, output_tokens_total=500 * second, capacity_tokens=10**6)
        )
        (seen,) = gauge.read([worker], float(second))
    assert seen.demand == pytest.approx(0.8)


def test_another_process_or_role_begins_anew_and_silence_is_not_ready() -> None:
    made = table_of(
        roles=(
            P,
            D,
        )
    )
    (worker, silent) = made.workers()
    gauge = Gauge(QUICK)
    for second in range(3):
        made.loads.on_report(worker, LoadReport(busy_ms_total=900 * second))
        seen, mute = gauge.read([worker, silent], float(second))
    assert seen.ready and not mute.ready
    made.loads.on_report(worker, LoadReport(busy_ms_total=5))
    seen, _ = gauge.read([worker, silent], 3.0)
    assert not seen.ready and seen.demand == 0
