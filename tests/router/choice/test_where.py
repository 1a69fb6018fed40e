"""Where each request goes (--route): the price on literals and in a queueing world, a chooser, and a router with dummy workers."""

import asyncio
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.attempts.request import Slo
from router.choice.policies import RoutingHints, make_chooser
from router.choice.where import (
    ANSWER_WEIGHT,
    LATE,
    MAX_ANSWER_WEIGHT,
    STAY,
    Ask,
    Candidate,
    Figures,
    FittedLine,
    PageSource,
    Price,
    decide,
    excess_s,
    price,
    wait_for_room_s,
)
from router.config import ChoiceFlags
from router.history.forecast import MAX_PAUSED, MIN_POINTS, STALE_S, Forecast
from router.pool.breaker import Check
from router.pool.worker import PAIR, UNIFIED, LoadReport, Role, Worker
from router.pool.workers import missing_roles, silent_roles
from router.requests.route_choice import MAX_TRIES, TRY_EVERY, Choice, RouteChooser
from tests.router.choice.queueing import ROUTES, Speeds, World, auto, fixed, load_of
from tests.router.dummies import CHAT, STREAM, Cluster, always, cluster, table_of, until

TTFT, STEP = FittedLine(0.02, 1e-3), FittedLine(0.02, 0.001)  # a token is computed in 1 ms
HANDOVER = FittedLine(0.04, 0.0)
WIRE = FittedLine(0.03, 0.00025)  # 0.04 s for 40 tokens
FREE = Figures(TTFT, STEP, handover=HANDOVER)
NEW, FAR = 0, 1  # ids of a prefill and a decode worker
CANDIDATES = list(ROUTES.values())


def where(tokens: int, *, ask: dict[str, Any] | None = None, cached: int = 0, **at: dict[str, Any]) -> str:
    """The route of a prompt. `at`: figures of prefill and decode that differ from those of a free worker."""
    figures = {NEW: FREE._replace(**at.get("prefill", {})), FAR: FREE._replace(**at.get("decode", {}))}
    candidates = [Candidate("pair", (NEW, FAR)), Candidate("decode", (FAR,), cached), Candidate("prefill", (NEW,))]
    return decide(candidates, Ask(tokens, 100.0)._replace(**(ask or {})), figures).chosen.route


@pytest.mark.parametrize(
    ("tokens", "route", "at"),
    [
        # Without load nothing is handed over.
        (20, "decode", {}),
        (3000, "decode", {}),
        # A prompt that would stall answers is computed apart, a short one does not pay the hand-over.
        (3000, "pair", {"decode": {"answers": 4}, "prefill": {"answers": 2, "step": FittedLine(0.5, 0.001)}}),
        (4, "decode", {"decode": {"answers": 4}, "prefill": {"step": FittedLine(0.5, 0.001)}}),
        # So is one that decode has nearly whole: what it lacks is short.
        (3000, "decode", {"decode": {"answers": 4}, "prefill": {"step": FittedLine(0.5, 0.001)}, "cached": 2996}),
        # A queue of prompts overflows to the other worker, a full batch of answers, too.
        (200, "decode", {"decode": {"answers": 4}, "prefill": {"waiting_tokens": 3000}}),
        (20, "prefill", {"decode": {"answers": 30}}),
        (20, "prefill", {"decode": {"answers": 3, "max_answers": 3}}),
        (20, "prefill", {"decode": {"answers": 1, "held_tokens": 2000.0, "capacity_tokens": 1000}}),
        # A measured stall of answers at prefill keeps them away.
        (40, "pair", {"decode": {"answers": 8}, "prefill": {"step": FittedLine(0.2, 0.001)}}),
        # What is beyond an objective counts more than what is within.
        (300, "decode", {"decode": {"answers": 1}, "prefill": {"waiting_tokens": 30, "step": FittedLine(0.2, 0.001)}}),
        (300, "pair", {"decode": {"answers": 1}, "prefill": {"waiting_tokens": 30, "step": FittedLine(0.2, 0.001)}, "ask": {"itl_s": 0.0225}}),
        (300, "decode", {"decode": {"answers": 2}, "prefill": {"waiting_tokens": 250, "step": FittedLine(0.2, 0.001)}, "ask": {"ttft_s": 0.35}}),
    ],
)  # fmt: skip
def test_where_a_prompt_goes(tokens: int, route: str, at: dict[str, Any]) -> None:
    assert where(tokens, **at) == route


def test_a_price_has_its_parts() -> None:
    figures = {NEW: FREE._replace(waiting_tokens=50, answers=3, handover=WIRE), FAR: FREE._replace(answers=2)}
    source = PageSource(FAR, tokens=512, missing=300, seconds=0.007)
    found = price(Candidate("pair", (NEW, FAR), 200, held=960, source=source), Ask(1000, 10.0, ttft_s=0.5), figures)
    assert found.queue_s == pytest.approx(0.05) and found.compute_s == pytest.approx(TTFT.at(500))
    steps_s = 2 * STEP.at(3)  # that the fetch waits for
    assert found.transfer_s == pytest.approx(0.04 + 0.007 + steps_s)
    assert found.itl_s == pytest.approx(ANSWER_WEIGHT * 10 * STEP.at(3))
    assert found.others_s == pytest.approx(ANSWER_WEIGHT * (3 * 0.5 + 2 * 10 * 0.001))
    assert found.late_s == pytest.approx(LATE * (0.05 + 0.52 + 0.047 + steps_s - 0.5))
    assert found.total_s == pytest.approx(sum(found))


def test_answers_within_their_objective_may_be_stalled_a_little() -> None:
    """Late is only what exceeds the slack of the answers that run there."""
    alone = Candidate("decode", (FAR,))
    figures = {FAR: FREE._replace(answers=2)}
    ask = Ask(90, 100.0, itl_s=0.024)
    assert price(alone, ask, figures).late_s == 0.0
    late_s = LATE * 2 * (0.4 - 100 * (0.024 - STEP.at(3)))
    assert price(alone, ask._replace(prompt_tokens=400), figures).late_s == pytest.approx(late_s)
    pair = price(Candidate("pair", (NEW, FAR)), ask._replace(prompt_tokens=600), figures | {NEW: figures[FAR]})
    assert pair.late_s == pytest.approx(LATE * 2 * (0.6 - 100 * (0.024 - STEP.at(2))))


def test_answers_that_are_late_already_count_by_what_they_get_later() -> None:
    figures = {FAR: FREE._replace(answers=8)}
    found = price(Candidate("decode", (FAR,)), Ask(50, 100.0, itl_s=0.01), figures)
    own_s, others_s = 100 * (STEP.at(9) - 0.01), 8 * (100 * STEP.slope_s + 50 * TTFT.slope_s)
    assert found.late_s == pytest.approx(LATE * (own_s + others_s))


def test_times_that_vary_are_sometimes_late() -> None:
    """By the mean excess of a normal distribution, which grows with how near its mean lies to the objective."""
    draw = random.Random(1)
    for mean_s in (-0.05, -0.02, 0.0, 0.03):
        drawn_s = sum(max(0.0, draw.gauss(mean_s, 0.02)) for _ in range(20_000)) / 20_000
        assert excess_s(mean_s, 0.02) == pytest.approx(drawn_s, abs=5e-4)
    assert excess_s(-math.inf, 0.02) == excess_s(-0.02, 0.0) == 0.0 and excess_s(0.02, 0.0) == 0.02
    steady, shaky = FREE._replace(answers=2), FREE._replace(answers=2, step=STEP._replace(spread_s=0.004))
    late = [
        price(Candidate("decode", (FAR,)), Ask(50, 100.0, itl_s=0.025), {FAR: one}).late_s for one in (steady, shaky)
    ]
    assert late[0] == 0.0 < late[1]


def test_nothing_is_late_before_a_measurement() -> None:
    figures = {NEW: FREE._replace(answers=2, is_guessed=True), FAR: FREE}
    for candidate in (Candidate("prefill", (NEW,)), Candidate("pair", (NEW, FAR)), Candidate("pair", (FAR, NEW))):
        assert price(candidate, Ask(5000, 100.0, 0.001, 0.001), figures).late_s == 0.0


def test_a_worker_without_room_is_waited_for_as_long_as_its_requests_stay() -> None:
    full = FREE._replace(answers=10, held_tokens=900.0, capacity_tokens=1000)
    assert wait_for_room_s(FREE, Ask(100, 100.0)) == wait_for_room_s(full, Ask(50, 50.0)) == 0.0
    assert wait_for_room_s(full, Ask(500, 100.0)) == pytest.approx(0.5 * 100 * STEP.at(10))
    assert wait_for_room_s(FREE._replace(answers=7, max_answers=4), Ask(1, 100.0)) == pytest.approx(100 * STEP.at(7))


seconds = st.floats(0.0, 1.0)
lines = st.builds(FittedLine, seconds, st.floats(0.0, 0.01), seconds)
some_figures = st.builds(
    Figures,
    lines,
    lines,
    st.integers(0, 9999),
    st.integers(0, 64),
    st.floats(0, 1e5),
    st.integers(0, 99999),
    st.integers(0, 64),
    lines,
    st.floats(0.0, MAX_PAUSED),
)
asks = st.builds(
    Ask,
    st.integers(1, 9999),
    st.floats(1.0, 999.0),
    st.one_of(st.floats(0.001, 1.0), st.just(math.inf)),
    st.one_of(st.floats(0.001, 1.0), st.just(math.inf)),
)


@settings(max_examples=100)
@given(some_figures, some_figures, asks, st.sampled_from([None, *ROUTES]), st.integers(0, 9999))
def test_the_choice_is_never_dearer_than_the_best_fixed_route(
    prefill: Figures, decode: Figures, ask: Ask, last: str | None, cached: int
) -> None:
    figures = {NEW: prefill, FAR: decode}
    candidates = [*CANDIDATES, Candidate("decode", (FAR,), min(cached, ask.prompt_tokens - 1))]
    decision = decide(candidates, ask, figures, last=last)
    best_s = min(price(one, ask, figures).total_s for one in candidates)
    assert decision.price == price(decision.chosen, ask, figures)
    assert best_s <= decision.price.total_s <= best_s / (1 - STAY) * (1 + 1e-9)
    assert last is not None or decision.price.total_s == best_s
    assert decision.runner_up is not None and decision.runner_up.route != decision.chosen.route


LOADS = {
    "chat": {"rate": 10, "prompts": (100, 300, 800), "answers": (50, 150, 300)},
    "long prompts": {"rate": 2.7, "prompts": (2000, 4000), "answers": (20, 60)},
    "both": {"rate": 4, "prompts": (50, 100, 4000), "answers": (30, 400)},
    "short": {"rate": 40, "prompts": (20, 50), "answers": (20, 40)},
    "calm": {"rate": 0.5, "prompts": (100, 3000), "answers": (20, 200)},
    "long answers": {"rate": 6, "prompts": (50,), "answers": (600,)},
}


@pytest.mark.parametrize("name", LOADS)
def test_no_fixed_route_is_better_by_more_than_3_percent(name: str) -> None:
    load = load_of(**LOADS[name], seconds=60.0)
    best_s = min(World(fixed(route), Speeds()).run(load) for route in ROUTES)
    assert World(auto, Speeds()).run(load) <= 1.03 * best_s


class Pool:
    """A table with workers of these roles, which serve alone, and a chooser that has measured each."""

    def __init__(self, *roles: Role, policy: str = "least_load", known: bool = True, fixed: bool = False) -> None:
        self.table, self.forecast = table_of(roles=roles), Forecast()
        self.table.whole_at = frozenset(PAIR)
        self.workers = self.table.workers()
        made = make_chooser(ChoiceFlags(policy=policy), draw=lambda n: 0)
        self.chooser = RouteChooser(
            policies=made.policies, forecast=self.forecast, worker_of=self.table.get, index=made.index, fixed=fixed
        )
        for worker in self.workers:
            self.table.on_whole(worker, True)
        for worker in self.workers if known else ():
            self.measure(worker)

    def measure(self, worker: Worker, *, now_s: float = 0.0, ttft: FittedLine = TTFT) -> None:
        for i in range(MIN_POINTS):
            for whole in (True, False) if worker.role is Role.PREFILL else (True,):
                seconds = ttft.at(100 * i) + (0.0 if whole else HANDOVER.base_s)
                prompt = self.forecast.expect(worker, 0, now_s=now_s - seconds, whole=whole)
                prompt.ahead_tokens = 100 * i
                self.forecast.learn_ttft(prompt, now_s=now_s)
            self.measure_answer(worker, STEP.at(i), requests=i, now_s=now_s)

    def measure_answer(self, worker: Worker, itl_s: float, *, requests: int = 1, now_s: float = 0.0) -> None:
        """Of 100 events beside `requests`."""
        answer = self.forecast.begin_answer(worker, now_s=now_s - 100 * itl_s)
        answer.requests = 2 * requests - worker.num_answers
        self.forecast.learn_answer(answer, 100, last_s=now_s, now_s=now_s)

    def of(self, role: Role) -> Worker:
        return next(worker for worker in self.workers if worker.role is role)

    def choose(self, tokens: int, *, now_s: float = 1.0, slo: Slo | None = None, **hints: Any) -> Choice:
        ways = [group for way in (PAIR, UNIFIED) for group in self.table.routes(way, "")]
        return self.chooser.choose(ways, RoutingHints(prompt_tokens=tokens, output_tokens=100, **hints), now_s, slo)

    def routes(self, *sizes: int) -> list[str]:
        """The workers of each prompt by the first letters of their roles; nothing is sent."""
        return ["".join(one.worker.role[0] for one in self.choose(size).placements) for size in sizes]

    def load(self, worker: Worker, requests: int) -> None:
        for _ in range(requests):
            self.table.loads.charge(worker, 100)

    def answer(self, worker: Worker, requests: int) -> None:
        """Whole requests run there, past their prompts."""
        for _ in range(requests):
            self.table.loads.on_answer(self.table.loads.charge(worker, 0))


def test_each_request_goes_where_it_costs_least() -> None:
    pool = Pool(*PAIR)
    assert pool.routes(20, 3000) == ["d", "d"]
    pool.load(pool.of(Role.DECODE), 6)
    pool.answer(pool.of(Role.PREFILL), 6)
    pool.table.loads.charge(pool.of(Role.DECODE), 1)
    assert pool.routes(20, 3000) == ["p", "p"]
    pool.answer(pool.of(Role.PREFILL), 8)
    assert pool.routes(20)[0] == "d"
    pool.table.loads.check(pool.workers)


def test_only_workers_that_say_so_serve_alone() -> None:
    pool = Pool(*PAIR)
    pool.table.on_whole(pool.of(Role.DECODE), False)
    assert pool.routes(20, 3000) == ["p", "p"]
    pool.table.on_whole(pool.of(Role.PREFILL), False)
    assert pool.routes(20, 3000) == ["pd", "pd"] and pool.choose(20).decision is None
    pool.table.whole_at = frozenset()
    pool.table.on_whole(pool.of(Role.PREFILL), True)
    assert pool.routes(20) == ["pd"], "by --route"
    pool.table.check()


def test_a_decision_tells_its_reasons() -> None:
    decision = Pool(*PAIR).choose(300).decision
    assert decision is not None and decision.runner_up is not None
    assert (decision.chosen.route, decision.runner_up.route) == ("decode", "prefill")
    assert decision.price.compute_s == pytest.approx(TTFT.at(300), rel=0.02)
    assert decision.runner_up_s >= decision.price.total_s


def test_unified_workers_are_the_reserve_of_a_fixed_route() -> None:
    pool = Pool(*PAIR, Role.UNIFIED, fixed=True)
    pool.table.whole_at = frozenset()
    pool.table.on_whole(pool.of(Role.DECODE), False)
    pool.load(pool.of(Role.DECODE), 30)
    assert pool.routes(20) == ["pd"]
    pool.table.on_check(pool.of(Role.DECODE), Check.REFUSED, now_s=1.0)
    assert pool.routes(20) == ["u"]
    assert Pool(*PAIR, Role.UNIFIED).routes(20) != ["pd"]


def test_what_is_unknown_and_idle_is_tried_some_times_and_goes_by_the_others_figures() -> None:
    pool = Pool(*PAIR, known=False)
    pool.measure(pool.of(Role.PREFILL))
    assert pool.routes(*[3000] * MAX_TRIES) == ["d"] * MAX_TRIES
    assert pool.routes(6000) == ["p"], "as cheap, and with fewer requests so far"
    pool.answer(pool.of(Role.DECODE), 4)
    assert pool.routes(3000) == ["p"]


def test_few_requests_are_tries_and_some_time_none() -> None:
    """The cluster is idle, the pair unmeasured and dearer by its transfers: one client in a while waits longer."""
    pool = Pool(*PAIR, known=False)
    prefill, decode = pool.of(Role.PREFILL), pool.of(Role.DECODE)
    for worker in (prefill, decode):
        for _ in range(MIN_POINTS):
            pool.forecast.line(worker, whole=True).add(1000.0, 0.5, 0.0)
            pool.measure_answer(worker, 0.02)
    pool.table.loads.on_report(prefill, LoadReport(transfer_ms=100.0))
    routes = pool.routes(*[3000] * (MAX_TRIES + 2) * TRY_EVERY)
    assert [at for at, route in enumerate(routes) if route == "pd"] == [TRY_EVERY * i for i in range(MAX_TRIES)]


def test_a_worker_that_is_new_goes_by_those_of_its_role() -> None:
    pool = Pool(Role.PREFILL, Role.DECODE, Role.DECODE, known=False)
    prefill, old, new = pool.workers
    pool.measure(prefill)
    for _ in range(MIN_POINTS):
        pool.forecast.learn_ttft(pool.forecast.expect(old, 100, now_s=0.0), now_s=30.0)
        pool.measure_answer(old, 0.5, now_s=30.0)
    figures = pool.forecast.figures(new)
    assert figures.ttft.at(100) == pytest.approx(30.0) and figures.step.at(1) == pytest.approx(0.5)
    pool.load(new, 1)
    pool.load(old, 2)
    assert pool.routes(20) == ["p"], "the new one is as slow as its like"


def test_the_hand_over_is_what_pairs_take_longer() -> None:
    pool = Pool(*PAIR)
    assert pool.forecast.figures(pool.of(Role.PREFILL)).handover.at(100) == pytest.approx(0.04, rel=0.02)
    unmeasured = Pool(*PAIR, known=False)
    prefill = unmeasured.of(Role.PREFILL)
    for _ in range(MIN_POINTS):
        unmeasured.forecast.line(prefill, whole=False).add(100.0, 0.5, 0.0)
    unmeasured.table.loads.on_report(prefill, LoadReport(transfer_ms=100.0))
    figures = unmeasured.forecast.figures(prefill)
    assert figures.handover.at(100) == pytest.approx(0.1) and figures.ttft.at(100) == pytest.approx(0.5)


def test_a_worker_is_faster_or_slower_than_its_role_but_no_other_line() -> None:
    """A loaded worker's points may have no slope; with it a queue would look free."""
    pool = Pool(Role.PREFILL, Role.PREFILL, Role.DECODE)
    slow = pool.workers[1]
    for _ in range(9 * MIN_POINTS):
        pool.forecast.line(slow, whole=True).add(350.0, 3 * TTFT.at(350), 0.0)
    figures = pool.forecast.figures(slow)
    assert figures.ttft.at(350) == pytest.approx(3 * TTFT.at(350), rel=0.05)
    assert figures.ttft.slope_s == pytest.approx(3 * TTFT.slope_s, rel=0.05)


def test_prompts_of_one_length_teach_what_a_token_costs() -> None:
    """A line through equal points has no slope; a prompt that stalls answers would look free."""
    pool = Pool(*PAIR, known=False)
    decode = pool.of(Role.DECODE)
    for _ in range(MIN_POINTS):
        pool.forecast.line(decode, whole=True).add(1000.0, 0.5, 0.0)
    assert pool.forecast.figures(decode).ttft.slope_s == pytest.approx(0.5e-3)


def test_what_was_slow_long_ago_is_tried_once_when_it_is_idle() -> None:
    pool = Pool(*PAIR)
    decode, prefill = pool.of(Role.DECODE), pool.of(Role.PREFILL)
    for _ in range(30):
        pool.measure(decode, ttft=FittedLine(60.0, 1e-3))
    assert pool.routes(20) == ["p"]
    pool.measure(prefill, now_s=STALE_S + 1)
    later_s = STALE_S + 2
    assert pool.choose(20, now_s=later_s).placements[0].worker is decode
    assert pool.choose(20, now_s=later_s).placements[0].worker is not decode, "one request is enough"


def test_figures_that_wobble_do_not_move_a_length_of_prompts() -> None:
    """Routes differ by 1 %, and the figures change sides: the first choice stays. A clear gain moves it."""
    last, found = None, set[str]()
    for step in range(6):
        waits = (0, 1) if step % 2 else (1, 0)
        figures = {at: FREE._replace(waiting_tokens=10 * waiting) for at, waiting in enumerate(waits)}
        last = decide(CANDIDATES, Ask(100, 100.0), figures, last=last).chosen.route
        found.add(last)
    assert len(found) == 1
    busy = {at: FREE._replace(answers=9 * (ROUTES[last].workers[0] == at)) for at in (NEW, FAR)}  # type: ignore[index]
    assert decide(CANDIDATES, Ask(100, 100.0), busy, last=last).chosen.route != last
    pool = Pool(*PAIR)
    (first,) = pool.routes(600)
    pool.load(pool.of(Role.DECODE), 20)
    assert pool.routes(600) != [first]


def test_prompts_beside_an_answer_are_no_part_of_its_steps() -> None:
    pool = Pool(*PAIR)
    decode = pool.of(Role.DECODE)
    alone_s = pool.forecast.figures(decode).itl_s(1)
    for i in range(200):
        answer = pool.forecast.begin_answer(decode, now_s=float(i))
        prompt = pool.forecast.expect(decode, 1000, now_s=float(i))
        prompt.line = ""
        pool.forecast.computed(prompt)
        answer.requests = 2
        prompts_s = 1000 * TTFT.slope_s
        pool.forecast.learn_answer(answer, 100, last_s=i + 100 * alone_s + prompts_s, now_s=i + 1.0)
    figures = pool.forecast.figures(decode)
    assert figures.step.at(1) == pytest.approx(alone_s, rel=0.02)
    assert figures.itl_s(1) == pytest.approx(alone_s + prompts_s / 100, rel=0.05)


def test_what_one_answer_more_costs_is_known_from_all_roles() -> None:
    """Where there were always five, the measurements of that role alone teach no slope."""
    pool = Pool(*PAIR, known=False)
    for i in range(30):
        pool.measure_answer(pool.of(Role.DECODE), STEP.at(i), requests=i)
        pool.measure_answer(pool.of(Role.PREFILL), 2 * STEP.at(5), requests=5)
    step = pool.forecast.figures(pool.of(Role.PREFILL)).step
    assert step.at(5) == pytest.approx(2 * STEP.at(5)) and step.slope_s == pytest.approx(STEP.slope_s)


def test_answers_weigh_more_the_more_slack_first_tokens_have() -> None:
    busy, candidate = Figures(TTFT, STEP, answers=1), Candidate("decode", (1,))
    prices = [price(candidate, Ask(100, 10.0, ttft_s, 0.1), {1: busy}) for ttft_s in (1.0, 5.0, 1000.0)]
    assert [one.itl_s / (10 * busy.itl_s(2)) for one in prices] == pytest.approx([0.2, 1.0, MAX_ANSWER_WEIGHT])


def test_a_pause_costs_more_where_prompts_take_more_of_the_time() -> None:
    calm = Figures(TTFT, STEP, answers=4)
    asked, candidate = Ask(1000, 100.0), Candidate("decode", (1,))
    others_s = [price(candidate, asked, {1: calm._replace(paused=paused)}).others_s for paused in (0.0, 0.5, 0.75)]
    assert [one / others_s[0] for one in others_s] == pytest.approx([1.0, 2.0, 4.0])


def test_a_stale_report_is_no_queue_of_a_prefill_worker() -> None:
    """Its tokens are computed by now, and would teach that more tokens take no longer."""
    pool = Pool(*PAIR)
    prefill = pool.of(Role.PREFILL)
    pool.table.loads.on_report(prefill, LoadReport(waiting_tokens=50_000))
    pool.table.loads.charge(prefill, 300)
    assert prefill.load_tokens > 50_000
    assert pool.forecast.expect(prefill, 300, now_s=0.0).ahead_tokens == 300


def test_a_request_s_own_objectives_count() -> None:
    pool = Pool(*PAIR)
    pool.load(pool.of(Role.DECODE), 3)
    pool.table.loads.charge(pool.of(Role.PREFILL), 250)
    for _ in range(MIN_POINTS):
        pool.measure_answer(pool.of(Role.PREFILL), 0.5)
    assert "".join(one.worker.role[0] for one in pool.choose(300, slo=Slo(ttft_s=0.4)).placements) == "d"
    assert "".join(one.worker.role[0] for one in pool.choose(300, slo=Slo(itl_s=0.0242)).placements) == "pd"


def test_kv_that_workers_report_counts() -> None:
    pool = Pool(*PAIR)
    decode = pool.of(Role.DECODE)
    assert pool.routes(3000) == ["d"]
    pool.load(decode, 2)
    pool.answer(pool.of(Role.PREFILL), 3)
    assert pool.routes(300) == ["d"]
    full = LoadReport(
        running_reqs=2, used_tokens=9_900, capacity_tokens=10_000, stages={"prealloc": 1}, pending_tokens=30_000
    )
    pool.table.loads.on_report(decode, full)
    assert pool.routes(300) == ["p"]


def test_each_route_takes_its_turns() -> None:
    """Round robin goes on where the request went, and stands where it did not."""
    pool = Pool(*PAIR, *PAIR, policy="round_robin")
    order = [[one.worker.worker_id for one in pool.choose(3000).placements] for _ in range(3)]
    assert order == [[1], [3], [1]]


def test_all_workers_of_the_chosen_route_and_no_others_are_remembered() -> None:
    """The conversation's next prompt finds its KV where the last one was answered, though decode goes by load."""
    made = make_chooser(ChoiceFlags(prefill_policy="cache_aware"), draw=lambda n: 0)
    pool = Pool(Role.PREFILL, Role.DECODE, Role.DECODE)
    pool.chooser.policies, pool.chooser.index = made.policies, made.index
    assert made.index is not None
    keys = [b"k%d" % i for i in range(16)]
    long = 16 * 128 + 1
    _, first, second = pool.workers
    pool.load(second, 1)
    assert [one.worker for one in pool.choose(long, keys=keys).placements] == [first]
    assert [made.index.match(keys).depth(one.worker_id) for one in pool.workers] == [0, 16, 0]
    pool.load(first, 2)  # a little load does not drive the next turn away
    (again,) = pool.choose(long, keys=keys).placements
    assert again.worker is first and again.cached_tokens == long - 1


def test_a_route_is_missing_only_if_every_route_is() -> None:
    pool = Pool(*PAIR, Role.UNIFIED)
    ways = (PAIR, UNIFIED)

    def down(role: Role) -> None:
        pool.table.on_check(pool.of(role), Check.REFUSED, now_s=1.0)

    assert missing_roles(pool.table, ways) == []
    down(Role.DECODE)
    assert missing_roles(pool.table, ways) == [] == missing_roles(pool.table, (PAIR,)), "prefill serves alone"
    pool.table.on_whole(pool.of(Role.PREFILL), False)
    assert missing_roles(pool.table, (PAIR,)) == [Role.DECODE] and missing_roles(pool.table, ways) == []
    assert pool.table.has_others(pool.of(Role.PREFILL)), "a unified worker does what it does"
    pool.table.on_silence(pool.of(Role.UNIFIED), True)
    assert silent_roles(pool.table, ways) == [Role.UNIFIED] and not pool.table.has_others(pool.of(Role.PREFILL))
    down(Role.UNIFIED)
    assert missing_roles(pool.table, ways) == [Role.DECODE, Role.UNIFIED] and silent_roles(pool.table, ways) == []


ALONE = {"serves_whole": True}


async def served_by(c: Cluster, body: dict[str, Any], **kw: Any) -> str:
    """The route: a pair, or the role of the worker that answered alone."""
    workers = (*c.prefills, *c.decodes, *c.alone)
    before = [len(worker.seen) for worker in workers]
    status, _, answer = await c.post("/v1/chat/completions", body, **kw)
    assert status == 200, answer
    await c.settled()
    new = [worker for worker, count in zip(workers, before, strict=True) if len(worker.seen) > count]
    assert all(("bootstrap_room" in worker.seen[-1].body) == (len(new) > 1) for worker in new)
    return "pair" if len(new) > 1 else {"null": "unified"}.get(new[0].mode, new[0].mode)


async def test_all_routes_serve_and_all_are_shown() -> None:
    async with cluster(unified_beside=1, info=ALONE) as c:
        await until(lambda: len(c.router.table.routes(PAIR, "")) == 3)
        found = {await served_by(c, STREAM) for _ in range(4 * MAX_TRIES)}
        assert found == {"pair", "decode", "prefill", "unified"}
        _, listed = await c.get("/workers")
        assert [w["role"] for w in listed["workers"]] == ["prefill", "decode", "unified"]
        assert [w["serves_whole"] for w in listed["workers"]] == [True] * 3
        assert (await c.get("/server_info"))[1]["mixed"] is True
        assert (await c.get("/dashboard/state"))[1]["router"]["mixed"] is True
        status, answer = await c.get("/readiness")
        assert status == 200 and answer["healthy_workers"] == 3
        status, _, answer = await c.post("/workers", {"url": "http://127.0.0.1:9"})
        assert status == 400 and b"must be one of prefill, decode, unified" in answer


@pytest.mark.parametrize("route", ["pair", "decode", "prefill"])
async def test_a_fixed_route_takes_all(route: str) -> None:
    async with cluster(info=ALONE, route=route) as c:
        await until(lambda: all(worker.serves_whole for worker in c.router.table.workers()))
        assert {await served_by(c, body) for body in (STREAM, CHAT) for _ in range(4)} == {route}


async def test_a_fixed_route_without_a_worker_says_so() -> None:
    async with cluster(route="decode") as c:
        status, _, answer = await c.post("/v1/chat/completions", CHAT)
        assert status == 503 and b"it serves no whole requests, give --route pair or auto" in answer


@pytest.mark.parametrize(("lost", "left"), [("prefill", "decode"), ("decode", "prefill")])
async def test_each_half_of_a_pair_serves_what_the_other_leaves(lost: str, left: str) -> None:
    async with cluster(info=ALONE, retry_backoff_s=0.0) as c:
        for worker in c.prefills if lost == "prefill" else c.decodes:
            await worker.stop()
        assert [await served_by(c, CHAT) for _ in range(4)] == [left] * 4
        assert (await c.get("/readiness"))[0] == 200
        for worker in (*c.prefills, *c.decodes):
            await worker.stop()
        await until(lambda: len(missing_roles(c.router.table, (PAIR,))) == 2)
        status, _, answer = await c.post("/v1/chat/completions", CHAT)
        assert status == 503 and b"no prefill" in answer and b"decode worker is alive" in answer


@pytest.mark.parametrize("bad", ["prefill", "decode"])
async def test_a_retry_takes_a_route_that_has_not_failed(bad: str) -> None:
    """A worker answers 500: the next attempt goes around it, and its circuit opens."""
    async with cluster(info=ALONE, retry_max=1, cb_failure_threshold=2) as c:
        await until(lambda: len(c.router.table.routes(PAIR, "")) == 3)
        worker = c.prefills[0] if bad == "prefill" else c.decodes[0]
        worker.behave = always(500, {"error": {"message": "no memory"}})
        for _ in range(6):
            status, _, answer = await c.post("/v1/chat/completions", CHAT)
            assert status == 200 and json.loads(answer)["from"] != worker.name
        assert len(worker.seen) <= 2, "its circuit is open: others are taken at once"


async def test_a_refused_objective_is_one_that_no_route_keeps() -> None:
    async with cluster(unified_beside=1) as c:
        for worker in c.router.table.workers():
            ttft, step = c.router.admission.forecast.fits(worker)
            for i in range(MIN_POINTS):
                ttft.add(100.0 * i, 5.0 if worker.role is Role.PREFILL else 0.5, asyncio.get_running_loop().time())
                step.add(float(i), 0.01, asyncio.get_running_loop().time())
        assert await served_by(c, STREAM, headers={"X-SLO-TTFT-ms": "1000"}) == "unified"
        status, _, answer = await c.post("/v1/chat/completions", STREAM, headers={"X-SLO-TTFT-ms": "100"})
        assert status == 429 and b"slo_ttft" in answer


async def test_an_objective_holds_for_prompts_that_decode_computes() -> None:
    """Decode would be late with the prompt, prefill alone with the answer: only the pair keeps both."""
    async with cluster(info=ALONE) as c:
        await until(lambda: len(c.router.table.routes(PAIR, "")) == 3)
        now_s, forecast = asyncio.get_running_loop().time(), c.router.admission.forecast
        for worker in c.router.table.workers():
            is_prefill = worker.role is Role.PREFILL
            for i in range(MIN_POINTS):
                for whole in {True, not is_prefill}:
                    forecast.line(worker, whole=whole).add(100.0 * i, 0.1 if is_prefill else 5.0, now_s)
                forecast.fits(worker)[1].add(float(i), 5.0 if is_prefill else 0.01, now_s)
        objectives = {"X-SLO-TTFT-ms": "1000", "X-SLO-ITL-ms": "1000"}
        assert await served_by(c, STREAM, headers=objectives) == "pair"
        for worker in c.router.table.workers():
            for i in range(9 * MIN_POINTS) if worker.role is Role.PREFILL else ():
                forecast.line(worker, whole=False).add(100.0 * i, 5.0, now_s)
        status, _, answer = await c.post("/v1/chat/completions", STREAM, headers=objectives)
        assert status == 429 and b"slo_ttft" in answer


async def test_a_prefill_worker_s_own_apis_may_go_to_a_unified_one() -> None:
    async with cluster(unified_beside=1) as c:
        await c.prefills[0].stop()
        status, _, _ = await c.post("/v1/embeddings", {"model": "m", "input": "hi"})
        assert status == 200 and c.alone[0].seen[0].path == "/v1/embeddings"


async def test_a_conversation_stays_where_its_answers_are() -> None:
    """The first turn goes anywhere, the next ones to the worker that answered, which alone holds all of it."""
    async with cluster(decode=3, info=ALONE) as c:
        await until(lambda: all(worker.serves_whole for worker in c.router.table.workers()))
        messages = [{"role": "user", "content": "q" * 3000}]
        answered = list[str]()
        for turn in range(4):
            status, _, body = await c.post("/v1/chat/completions", {"model": "m", "messages": messages})
            assert status == 200
            answered.append(json.loads(body)["from"])
            messages += [{"role": "assistant", "content": "a" * 400}, {"role": "user", "content": f"and {turn}?"}]
        await c.settled()
        assert len(set(answered[1:])) == 1


async def test_the_time_line_tells_why() -> None:
    async with cluster(info=ALONE) as c:
        await until(lambda: len(c.router.table.routes(PAIR, "")) == 3)
        assert await served_by(c, STREAM, headers={"X-Request-Id": "why"}) in ROUTES
        _, _, answer = await c.post("/traces", {"ids": ["why"]})
        (record,) = [one for one in json.loads(answer)["records"] if one["process"] == "router"]
        said = record["attributes"]
        assert said["tandem.route"] in ROUTES and said["tandem.route.runner_up"] in ROUTES
        parts = {name for name in said if name.startswith("tandem.route.price.")}
        assert parts == {f"tandem.route.price.{part}" for part in Price._fields}
