"""Where each request of a mixed pool goes (--mixed): the rule on literals, and a router with dummy workers of all three kinds."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from router.attempts.request import Slo
from router.choice.policies import Placement, RoutingHints, make_chooser
from router.config import ChoiceFlags
from router.history.forecast import MIN_POINTS, STALE_S, Forecast
from router.pool.breaker import Check
from router.pool.worker import PAIR, UNIFIED, LoadReport, Role, Worker
from router.pool.workers import missing_roles, silent_roles
from router.requests.route_choice import (
    Ask,
    FittedLine,
    RouteChooser,
    WorkerMetrics,
    pair_slo_cost,
    route_to_take,
    unified_slo_cost,
    wait_for_room_s,
)
from tests.router.dummies import CHAT, STREAM, Cluster, always, cluster, table_of, until

WANTED = Slo(ttft_s=4.0, itl_s=0.04)
# A token is computed in 1 ms; a hand-over takes 40 ms.
SLOW_HANDOVER, ALONE = FittedLine(0.06, 1e-3), FittedLine(0.02, 1e-3)
STEP = FittedLine(0.02, 0.001)
PREFILL = DECODE = WorkerMetrics(SLOW_HANDOVER, STEP)
FREE = WorkerMetrics(ALONE, STEP)


def ask(tokens: int) -> Ask:
    return Ask(tokens, tokens + 100, 100.0)


def goes_alone(tokens: int, wanted: Slo = WANTED, **at: dict[str, Any]) -> bool:
    """`at`: the figures of the workers (prefill, decode, alone) that differ from the usual ones."""
    one, alone = ask(tokens), FREE._replace(**at.get("alone", {}))
    prefill, decode = PREFILL._replace(**at.get("prefill", {})), DECODE._replace(**at.get("decode", {}))
    return unified_slo_cost(alone, one, wanted) < pair_slo_cost(prefill, one, decode, one, wanted)


@pytest.mark.parametrize(
    ("tokens", "alone", "at"),
    [
        # A short prompt goes where fewer answers run, and a long one holds up none.
        *((tokens, tokens <= 100, {"decode": {"requests": 8}, "alone": {"requests": 6}}) for tokens in (10, 100, 1000)),
        (10, False, {"decode": {"requests": 4}, "alone": {"requests": 6}}),
        # It skips the hand-over where the first token is in a hurry, or no requests wait.
        *(
            (tokens, hurry, {"wanted": Slo(0.1, 0.04) if hurry else WANTED})
            for tokens in (20, 3000)
            for hurry in (0, 1)
        ),
        (1000, False, {}),
        (1000, True, {"alone": {"company": 0.0}}),
        # The longer queue overflows to the other side.
        (1000, False, {"alone": {"requests": 4}}),
        (1000, True, {"alone": {"requests": 4}, "prefill": {"waiting_tokens": 3000}}),
        (20, True, {"decode": {"requests": 6}, "alone": {"requests": 4}}),
        (20, False, {"decode": {"requests": 6}, "alone": {"requests": 4, "waiting_tokens": 3000}}),
        # So does a full batch of answers.
        *((1000, requests > 2, {"decode": {"requests": requests}}) for requests in (2, 30)),
        # The tightest SLO counts most.
        (100, True, {"prefill": {"waiting_tokens": 800}, "alone": {"requests": 30}, "wanted": Slo(1.0, 1.0)}),
        (100, False, {"prefill": {"waiting_tokens": 800}, "alone": {"requests": 30}, "wanted": Slo(20.0, 0.06)}),
    ],
)
def test_where_a_prompt_goes(tokens: int, alone: bool, at: dict[str, Any]) -> None:
    assert goes_alone(tokens, **at) == alone


def test_a_worker_without_room_is_waited_for_as_long_as_its_requests_stay() -> None:
    full = DECODE._replace(requests=10, held_tokens=900.0, capacity_tokens=1000)
    assert wait_for_room_s(DECODE, ask(100)) == wait_for_room_s(full, Ask(1, 100, 100.0)) == 0.0
    assert wait_for_room_s(full, Ask(1, 600, 100.0)) == pytest.approx(0.5 * 100 * STEP.at(10))
    assert wait_for_room_s(DECODE._replace(requests=7, most_requests=4), ask(100)) == pytest.approx(100 * STEP.at(7))
    assert goes_alone(1000, decode={"requests": 10, "held_tokens": 2000.0, "capacity_tokens": 1000})


class Pool:
    """A table with workers of all roles, and a chooser that has measured each of `known`."""

    def __init__(self, *roles: Role, policy: str = "least_load", known: bool = True) -> None:
        self.table, self.forecast = table_of(roles=roles), Forecast()
        self.workers = self.table.workers()
        policies = make_chooser(ChoiceFlags(policy=policy), draw=lambda n: 0).policies
        self.chooser = RouteChooser(policies=policies, forecast=self.forecast, wanted=WANTED)
        for worker in self.workers if known else ():
            self.measure(worker)

    def measure(self, worker: Worker, *, now_s: float = 0.0, ttft: FittedLine | None = None) -> None:
        line = ttft or (ALONE if worker.role is Role.UNIFIED else SLOW_HANDOVER)
        ttft_fit, step_fit = self.forecast.fits(worker)
        for i in range(MIN_POINTS):
            ttft_fit.add(100.0 * i, line.at(100.0 * i), now_s)
            step_fit.add(float(i), STEP.at(i), now_s)

    def of(self, role: Role) -> Worker:
        return next(worker for worker in self.workers if worker.role is role)

    def choose(self, tokens: int, *, now_s: float = 1.0, slo: Slo | None = None, **hints: Any) -> Sequence[Placement]:
        ways = [[self.table.pool(role, "") for role in way] for way in (PAIR, UNIFIED)]
        asked = RoutingHints(prompt_tokens=tokens, output_tokens=100, **hints)
        return self.chooser.choose([way for way in ways if all(way)], asked, now_s, slo)

    def roles(self, *sizes: int) -> list[str]:
        """Who computes each prompt, one letter each; nothing is sent."""
        return [self.choose(size)[0].worker.role[0] for size in sizes]

    def load(self, worker: Worker, requests: int) -> None:
        for _ in range(requests):
            self.table.loads.charge(worker, 100)


ALL = (Role.PREFILL, Role.DECODE, Role.UNIFIED)


def test_each_request_goes_where_it_strains_less() -> None:
    pool = Pool(*ALL)
    pool.load(pool.of(Role.UNIFIED), 4)
    pool.load(pool.of(Role.DECODE), 6)
    assert pool.roles(20, 3000, 20, 3000) == ["u", "p", "u", "p"]


def test_one_way_alone_needs_no_choice() -> None:
    pool = Pool(Role.PREFILL, Role.DECODE)
    assert [p.worker.role for p in pool.choose(20)] == list(PAIR)
    assert [p.worker.role for p in Pool(Role.UNIFIED).choose(3000)] == list(UNIFIED)


def test_what_is_unknown_and_idle_is_tried_and_then_goes_by_the_other_s_figures() -> None:
    pool = Pool(*ALL, known=False)
    pool.measure(pool.of(Role.PREFILL))
    pool.measure(pool.of(Role.DECODE))
    assert pool.roles(3000) == ["u"]
    pool.load(pool.of(Role.UNIFIED), 1)
    assert pool.roles(3000) == ["p"]


def test_a_worker_that_is_new_goes_by_its_pool_s_figures() -> None:
    pool = Pool(*ALL)
    new = pool.table.add("http://new:1", role=Role.UNIFIED)
    pool.table.on_check(new, Check.OK, now_s=0.0)
    for worker in (pool.of(Role.UNIFIED), pool.of(Role.DECODE)):
        pool.load(worker, 2)
    pool.load(new, 1)
    for _ in range(201):  # the slow figures outweigh the first
        pool.measure(pool.of(Role.UNIFIED), ttft=FittedLine(30.0, 1e-3))
    assert pool.choose(20)[0].worker.role is Role.PREFILL, "the new one is as slow as its like"


def test_what_was_slow_long_ago_is_tried_once_when_it_is_idle() -> None:
    pool = Pool(*ALL)
    alone = pool.of(Role.UNIFIED)
    pool.measure(alone, ttft=FittedLine(60.0, 1e-3))
    assert pool.roles(20) == ["p"]
    pool.measure(pool.of(Role.PREFILL), now_s=STALE_S + 1)
    later_s = STALE_S + 2
    assert pool.choose(20, now_s=later_s)[0].worker is alone
    assert pool.choose(20, now_s=later_s)[0].worker is not alone, "one request is enough"


def test_figures_that_wobble_do_not_move_a_length_of_prompts() -> None:
    """The ways differ by 1 %, and the figures change sides: the first choice stays. A clear gain moves it."""
    last, found = None, []
    for step in range(6):
        place = route_to_take([1.0 + 0.01 * (step % 2), 1.01 - 0.01 * (step % 2)], [Role.PREFILL, Role.UNIFIED], last)
        last = (Role.PREFILL, Role.UNIFIED)[place]
        found.append(place)
    assert found == [0] * 6
    assert route_to_take([1.0, 0.9], [Role.PREFILL, Role.UNIFIED], last) == 1
    pool = Pool(*ALL)
    first = pool.roles(600)
    pool.load(pool.of(Role.UNIFIED if first == ["u"] else Role.DECODE), 20)
    assert pool.roles(600) != first


def test_a_request_s_own_objectives_count_before_the_flags() -> None:
    pool = Pool(*ALL)
    pool.load(pool.of(Role.UNIFIED), 30)
    pool.table.loads.charge(pool.of(Role.PREFILL), 800)
    assert pool.choose(700, slo=Slo(ttft_s=1.0, itl_s=9.0))[0].worker.role is Role.UNIFIED
    assert pool.choose(700, slo=Slo(ttft_s=60.0))[0].worker.role is Role.PREFILL


def test_kv_that_workers_report_counts() -> None:
    pool = Pool(*ALL)
    decode = pool.of(Role.DECODE)
    pool.load(pool.of(Role.UNIFIED), 2)
    pool.load(decode, 2)
    assert pool.roles(3000) == ["p"]
    full = LoadReport(
        running_reqs=2, used_tokens=9_900, capacity_tokens=10_000, stages={"prealloc": 1}, pending_tokens=30_000
    )
    pool.table.loads.on_report(decode, full)
    assert pool.roles(3000) == ["u"]


def test_each_way_takes_its_turns() -> None:
    """Round robin goes on where the request went, and stands where it did not."""
    pool = Pool(*ALL, *ALL, policy="round_robin")
    for worker in pool.workers[:3:2]:
        pool.load(worker, 9)
    order = [[placement.worker.worker_id for placement in pool.choose(3000)] for _ in range(3)]
    assert order == [[0, 1], [3, 4], [0, 1]]


def test_only_the_chosen_way_is_remembered() -> None:
    """A prefix that is cached at a unified worker keeps its prompts there; the prefill worker gets no credit for them."""
    pool = Pool(*ALL, policy="cache_aware")
    keys = [b"k%d" % i for i in range(16)]
    long = 16 * 128 + 1
    pool.load(pool.of(Role.UNIFIED), 2)
    pool.load(pool.of(Role.DECODE), 2)
    first = pool.choose(long, keys=keys)
    assert first[0].worker.role is Role.PREFILL and first[0].cached_tokens == 0
    index = pool.chooser.policies[Role.UNIFIED].index  # type: ignore[attr-defined]
    assert not index.match(keys).groups
    index.touch(pool.of(Role.UNIFIED).worker_id, keys)
    pool.chooser.policies[Role.PREFILL].index.forget(pool.of(Role.PREFILL).worker_id)  # type: ignore[attr-defined]
    (alone,) = pool.choose(long, keys=keys)
    assert alone.worker.role is Role.UNIFIED and alone.cached_tokens == long - 1


def test_a_way_is_missing_only_if_every_way_is() -> None:
    pool = Pool(*ALL)
    ways = (PAIR, UNIFIED)

    def down(role: Role) -> None:
        pool.table.on_check(pool.of(role), Check.REFUSED, now_s=1.0)

    assert missing_roles(pool.table, ways) == []
    down(Role.DECODE)
    assert missing_roles(pool.table, ways) == [] and missing_roles(pool.table, (PAIR,)) == [Role.DECODE]
    assert pool.table.has_others(pool.of(Role.PREFILL)), "a unified worker does what it does"
    pool.table.on_silence(pool.of(Role.UNIFIED), True)
    assert silent_roles(pool.table, ways) == [Role.UNIFIED] and not pool.table.has_others(pool.of(Role.PREFILL))
    down(Role.UNIFIED)
    assert missing_roles(pool.table, ways) == [Role.DECODE, Role.UNIFIED] and silent_roles(pool.table, ways) == []


async def served_by(c: Cluster, body: dict[str, Any]) -> str:
    status, _, answer = await c.post("/v1/chat/completions", body)
    assert status == 200, answer
    await c.settled()
    return "alone" if b"null-" in answer else "pair"


async def test_both_ways_serve_and_both_are_shown() -> None:
    async with cluster(mixed=1) as c:
        found = {await served_by(c, STREAM) for _ in range(2 * MIN_POINTS + 2)}
        assert found == {"alone", "pair"}
        assert all("bootstrap_room" not in seen.body for seen in c.alone[0].seen)
        _, listed = await c.get("/workers")
        assert [w["role"] for w in listed["workers"]] == ["prefill", "decode", "unified"]
        assert (await c.get("/server_info"))[1]["mixed"] is True
        assert (await c.get("/dashboard/state"))[1]["router"]["mixed"] is True
        status, answer = await c.get("/readiness")
        assert status == 200 and answer["healthy_workers"] == 3
        status, _, answer = await c.post("/workers", {"url": "http://127.0.0.1:9"})
        assert status == 400 and b"must be one of prefill, decode, unified" in answer


@pytest.mark.parametrize("lost", ["pair", "alone"])
async def test_the_other_way_serves_what_one_cannot(lost: str) -> None:
    async with cluster(mixed=1, retry_backoff_s=0.0) as c:
        for worker in c.alone if lost == "alone" else (*c.prefills, *c.decodes):
            await worker.stop()
        other = "pair" if lost == "alone" else "alone"
        assert [await served_by(c, CHAT) for _ in range(4)] == [other] * 4
        assert (await c.get("/readiness"))[0] == 200
        for worker in (*c.prefills, *c.decodes, *c.alone):
            await worker.stop()
        await until(lambda: len(missing_roles(c.router.table, (PAIR, UNIFIED))) == 3)
        status, _, answer = await c.post("/v1/chat/completions", CHAT)
        assert status == 503 and b"unified worker is alive" in answer and b"no prefill" in answer


@pytest.mark.parametrize("first", ["pair", "alone"])
async def test_a_retry_takes_the_way_that_has_not_failed(first: str) -> None:
    """Each way has one worker a role, which answers 500: the next attempt goes the other way, and its circuit opens."""
    async with cluster(mixed=1, retry_max=1, cb_failure_threshold=2) as c:
        bad = c.alone[0] if first == "alone" else c.decodes[0]
        bad.behave = always(500, {"error": {"message": "no memory"}})
        for _ in range(6):
            assert await served_by(c, CHAT) != first
        assert len(bad.seen) <= 2, "its circuit is open: the other way is taken at once"


async def test_a_refused_objective_is_one_that_no_way_keeps() -> None:
    async with cluster(mixed=1) as c:
        for worker in c.router.table.workers():
            ttft, step = c.router.admission.forecast.fits(worker)
            for i in range(MIN_POINTS):
                ttft.add(100.0 * i, 5.0 if worker.role is Role.PREFILL else 0.5, asyncio.get_running_loop().time())
                step.add(float(i), 0.01, asyncio.get_running_loop().time())
        status, _, answer = await c.post("/v1/chat/completions", STREAM, headers={"X-SLO-TTFT-ms": "1000"})
        assert status == 200 and b"null-0" in answer
        status, _, answer = await c.post("/v1/chat/completions", STREAM, headers={"X-SLO-TTFT-ms": "100"})
        assert status == 429 and b"slo_ttft" in answer


async def test_a_prefill_worker_s_own_apis_may_go_to_a_unified_one() -> None:
    async with cluster(mixed=1) as c:
        await c.prefills[0].stop()
        status, _, _ = await c.post("/v1/embeddings", {"model": "m", "input": "hi"})
        assert status == 200 and c.alone[0].seen[0].path == "/v1/embeddings"
