"""Who runs, who waits, who is refused: the line, the forecast, and both in a real router over workers that follow a law."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import generate_latest

from router.attempts.request import Events, RequestRefused, Slo
from router.choice.policies import LeastLoad, Placement, RoutingHints
from router.config import AdmissionFlags, RouterConfig
from router.history.forecast import DEFAULT_TTFT, MIN_POINTS, STALE_S, Forecast, LineFit
from router.history.metrics import RouterMetrics
from router.parts.admission import Admission, AdmissionQueue, TicketStatus, look_in_time, objectives_of
from router.pool.breaker import Event
from router.pool.shared_load import SharedLoad
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from tests.router.attempts import Launched, make_request
from tests.router.behaviours import later
from tests.router.dummies import Behaviour, DummyWorker, answer_ok, cluster, no_draw, stream, until


def line(*, running: int = 2, per_client: int = 0, queue: int = 3) -> AdmissionQueue:
    return AdmissionQueue(limits_of(running, per_client=per_client, queue=queue))


def limits_of(running: int, *, per_client: int = 0, queue: int) -> AdmissionFlags:
    return AdmissionFlags(
        max_concurrent_requests=running,
        max_concurrent_requests_per_client=per_client,
        queue_size=queue,
        queue_timeout_s=10.0,
    )


def test_higher_priority_goes_first_then_the_earlier_request() -> None:
    waits = line(running=1)
    runs, _ = waits.arrive("a", priority=0, now_s=0.0)
    tickets = [waits.arrive("a", priority=p, now_s=0.0)[0] for p in (0, 5, 5)]
    order = []
    while waits.num_running:
        changed = waits.leave(runs)
        waits.check()
        order += [tickets.index(ticket) for ticket in changed]
        runs = changed[0] if changed else runs
    assert order == [1, 2, 0]


def test_a_full_line_drops_the_lowest_priority_and_of_those_the_latest() -> None:
    waits = line(running=1, queue=2)
    waits.arrive("a", priority=0, now_s=0.0)
    low, high = (waits.arrive("a", priority=p, now_s=0.0)[0] for p in (0, 1))
    lowest, changed = waits.arrive("a", priority=-1, now_s=0.0)
    assert lowest.status is TicketStatus.FULL and not changed
    _, changed = waits.arrive("a", priority=1, now_s=0.0)
    assert changed == [low] and low.status is TicketStatus.FULL and high.status is TicketStatus.WAITS
    waits.check()


def test_who_floods_the_line_is_dropped_and_not_the_other() -> None:
    waits = line(running=1, queue=3)
    waits.arrive("flood", priority=0, now_s=0.0)
    flood = [waits.arrive("flood", priority=0, now_s=0.0)[0] for _ in range(3)]
    other, changed = waits.arrive("other", priority=0, now_s=0.0)
    assert other.status is TicketStatus.WAITS and changed == [flood[2]]


def test_a_client_at_its_limit_is_passed_over() -> None:
    waits = line(running=3, per_client=1)
    first, _ = waits.arrive("a", priority=0, now_s=0.0)
    second, _ = waits.arrive("a", priority=9, now_s=0.0)
    other, _ = waits.arrive("b", priority=0, now_s=0.0)
    assert [t.status for t in (first, second, other)] == [TicketStatus.RUNS, TicketStatus.WAITS, TicketStatus.RUNS]
    assert waits.leave(first) == [second]
    waits.check()


def test_a_request_that_waited_too_long_is_refused_and_one_that_leaves_makes_no_room() -> None:
    waits = line(running=1, queue=9)
    waits.arrive("a", priority=0, now_s=0.0)
    early, _ = waits.arrive("a", priority=0, now_s=1.0)
    late, _ = waits.arrive("a", priority=0, now_s=5.0)
    assert waits.tick(10.9) == [] and waits.tick(11.0) == [early] and early.status is TicketStatus.LATE
    assert waits.leave(late) == [] and waits.num_waiting == 0 and waits.num_running == 1


def test_limits_count_over_all_processes(tmp_path: Path) -> None:
    views = [SharedLoad(tmp_path / "load", row=row, num_rows=2) for row in range(2)]
    limits = limits_of(3, per_client=2, queue=5)
    here, there = (AdmissionQueue(limits, view) for view in views)
    first, _ = here.arrive("a", priority=0, now_s=0.0)
    assert there.arrive("a", priority=0, now_s=0.0)[0].status is TicketStatus.RUNS
    third, _ = there.arrive("a", priority=0, now_s=0.0)
    assert third.status is TicketStatus.WAITS, "its client has one here and one there"
    assert there.arrive("b", priority=0, now_s=0.0)[0].status is TicketStatus.RUNS
    assert here.arrive("c", priority=0, now_s=0.0)[0].status is TicketStatus.WAITS, "three run in all"
    here.leave(first)
    assert third in there.tick(0.0) or third.status is TicketStatus.WAITS  # c may have taken the room
    for view in views:
        view.close()


def test_the_fit_finds_a_line_and_follows_when_it_moves() -> None:
    fit, draw = LineFit(), random.Random(1)
    for _ in range(200):
        x = draw.uniform(0, 5000)
        fit.add(x, 0.02 + 3e-4 * x + draw.gauss(0, 0.005), 0.0)
    assert fit.slope == pytest.approx(3e-4, rel=0.05) and fit.intercept == pytest.approx(0.02, abs=0.01)
    assert fit.line.spread_s == pytest.approx(0.005, rel=0.3)
    for _ in range(300):
        x = draw.uniform(0, 5000)
        fit.add(x, 0.01 + 1e-4 * x, 0.0)
    assert fit.slope == pytest.approx(1e-4, rel=0.1)


def test_the_fit_says_nothing_early_and_nothing_absurd() -> None:
    fit = LineFit()
    for i in range(MIN_POINTS - 1):
        fit.add(i, 1.0, 0.0)
    assert fit.at(3) is None
    fit.add(100, 0.5, 0.0)  # falls: no slope then
    assert fit.slope == 0.0 and fit.at(1e9) == pytest.approx(fit.intercept)
    same = LineFit()
    for _ in range(50):
        same.add(7, 2.0, 0.0)
    assert same.at(7000) == pytest.approx(2.0), "without spread there is no slope"
    assert same.spread == 0.0


def pool(count: int, role: Role) -> tuple[WorkerTable, list[Worker]]:
    table = WorkerTable()
    return table, [table.add(f"http://w{i}", role=role) for i in range(count)]


def law(tokens: float) -> float:
    return 0.05 + 2e-4 * tokens


def teach(forecast: Forecast, table: WorkerTable, worker: Worker, *, speed: float = 1.0) -> None:
    """A queue that one prompt after another is computed from: the wait is that of all tokens there."""
    draw = random.Random(2)
    for i in range(60):
        tokens = draw.randrange(100, 4000)
        ahead = table.loads.charge(worker, draw.randrange(0, 20000))
        own = table.loads.charge(worker, tokens)
        prompt = forecast.expect(worker, tokens, now_s=float(i))
        table.loads.release(own)
        forecast.learn_ttft(prompt, now_s=i + law(ahead.tokens + tokens) / speed)
        table.loads.release(ahead)


def taken(forecast: Forecast, workers: list[Worker], slo: Slo, *, tokens: int = 0, now_s: float) -> Worker:
    """The least loaded of those that keep `slo` with a prompt of so many tokens. `RequestRefused`."""
    hints = RoutingHints(prompt_tokens=tokens)
    objectives = objectives_of(slo, workers[0].role, hints, forecast)
    return look_in_time(LeastLoad(no_draw), workers, hints, objectives, now_s=now_s).worker


def test_the_law_is_learnt_and_what_breaks_the_slo_is_refused_and_nothing_else() -> None:
    table, [worker] = pool(1, Role.PREFILL)
    forecast = Forecast()
    teach(forecast, table, worker)
    wrong = 0
    for queued in range(0, 20000, 500):
        lease = table.loads.charge(worker, queued)
        for own in (10, 1000, 8000):
            late = law(queued + own) > 2.0
            try:
                taken(forecast, [worker], Slo(ttft_s=2.0), tokens=own, now_s=61.0)
                wrong += late
            except RequestRefused as err:
                wrong += not late
                assert err.why == "slo_ttft" and err.retry_after_s is not None and err.retry_after_s >= 1
        table.loads.release(lease)
    assert wrong == 0


def test_only_workers_that_are_in_time_are_left_and_the_unknown_may_be() -> None:
    table, [fast, slow, new] = pool(3, Role.PREFILL)
    forecast = Forecast()
    teach(forecast, table, fast)
    teach(forecast, table, slow, speed=0.1)
    ask: dict[str, Any] = {"slo": Slo(ttft_s=2.0), "tokens": 5000, "now_s": 61.0}
    table.loads.charge(fast, 1)
    table.loads.charge(new, 2)  # so that the least loaded is `slow`
    assert taken(forecast, [fast, slow, new], **ask) is fast
    assert taken(forecast, [slow, new], **ask) is new
    with pytest.raises(RequestRefused):
        taken(forecast, [slow], **ask)
    forecast.forget(slow)  # another process now
    assert taken(forecast, [slow], Slo(ttft_s=2.0), tokens=5000, now_s=61.0) is slow


def test_one_request_tries_a_worker_that_was_silent_for_long() -> None:
    """Else it would be refused for ever what became fast meanwhile: who is refused teaches nothing."""
    table, [slow] = pool(1, Role.PREFILL)
    forecast = Forecast()
    teach(forecast, table, slow, speed=0.01)
    ask: dict[str, Any] = {"slo": Slo(ttft_s=1.0), "tokens": 100}
    with pytest.raises(RequestRefused):
        taken(forecast, [slow], now_s=80.0, **ask)
    later_s = 1000.0 + STALE_S
    assert taken(forecast, [slow], now_s=later_s, **ask) is slow
    with pytest.raises(RequestRefused):
        taken(forecast, [slow], now_s=later_s + 1, **ask)


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "tried"),
    [((5.0, 3.0), (5.0, 3.0), 1), ((3.0, 5.0), (20.0, 3.0), None)],
    ids=["longest ago", "not all that it misses is stale"],
)
def test_of_workers_that_are_late_one_is_tried(
    ttft_s: tuple[float, ...], itl_s: tuple[float, ...], tried: int | None
) -> None:
    _, workers = pool(2, Role.UNIFIED)
    forecast, now_s = Forecast(), 3.0 + STALE_S
    for worker, *measured_s in zip(workers, ttft_s, itl_s, strict=True):
        for fit, at_s in zip(forecast.fits(worker), measured_s, strict=True):
            for _ in range(MIN_POINTS):
                fit.add(1.0, 9.0, at_s)
    if tried is None:
        with pytest.raises(RequestRefused):
            taken(forecast, workers, Slo(1.0, 1.0), now_s=now_s)
    else:
        assert taken(forecast, workers, Slo(1.0, 1.0), now_s=now_s) is workers[tried]


@pytest.mark.parametrize(
    ("role", "slo", "whats"),
    [
        (Role.PREFILL, Slo(1.0, 1.0), ["ttft"]),
        (Role.DECODE, Slo(1.0, 1.0), ["itl"]),
        (Role.UNIFIED, Slo(1.0, 1.0), ["ttft", "itl"]),
        (Role.UNIFIED, Slo(itl_s=1.0), ["itl"]),
    ],
)
def test_a_worker_keeps_the_slo_of_its_role(role: Role, slo: Slo, whats: list[str]) -> None:
    assert [one.what for one in objectives_of(slo, role, RoutingHints(), Forecast())] == whats


def test_prompts_that_routes_can_avoid_refuse_no_pair() -> None:
    """They slow whole requests at a decode worker."""
    _, [worker] = pool(1, Role.DECODE)
    forecast = Forecast()
    for i in range(MIN_POINTS):
        forecast.answer_line(worker, whole=True).add(float(i), 0.5, 0.0)
        forecast.answer_line(worker, whole=False).add(float(i), 0.01, 0.0)
    for whole, keeps in ((False, True), (True, False)):
        (one,) = objectives_of(Slo(itl_s=0.02), Role.DECODE, RoutingHints(), forecast, whole=whole)
        assert one.keeps(Placement(worker, 0)) is keeps


def test_cached_tokens_of_a_prompt_take_no_time() -> None:
    table, [worker] = pool(1, Role.PREFILL)
    forecast = Forecast()
    teach(forecast, table, worker)
    (one,) = objectives_of(Slo(ttft_s=law(1000)), Role.PREFILL, RoutingHints(prompt_tokens=3000), forecast)
    assert [one.keeps(Placement(worker, cached)) for cached in (0, 1900, 2100)] == [False, False, True]


def test_requests_of_a_former_incarnation_teach_nothing() -> None:
    _, [worker] = pool(1, Role.PREFILL)
    forecast = Forecast()
    prompts = [forecast.expect(worker, 5, now_s=0.0) for _ in range(MIN_POINTS)]
    forecast.forget(worker)
    for prompt in prompts:
        forecast.learn_ttft(prompt, now_s=70.0)
    assert not forecast.fits(worker)[0].is_known
    figures = forecast.figures(worker)
    assert figures.ttft == DEFAULT_TTFT and figures.is_guessed, "nor do others of its role learn from it"


def test_time_between_tokens_is_forecast_by_the_requests_at_the_worker() -> None:
    forecast = Forecast()
    launched = Launched(events=Events(on_sent=(forecast.on_sent,), on_attempt_ended=(forecast.on_attempt_ended,)))
    table, worker, request = launched.table, launched.worker(Role.DECODE, "http://d0"), make_request()
    for requests in (*range(1, 20), *range(1, 20)):
        others = [table.loads.charge(worker, 1) for _ in range(requests - 1)]
        attempt, prefill, decode = launched.pair(request)
        decode.answer(200, events=True, complete=False)
        forecast.on_first_byte(request, attempt, 1.0)
        for event in range(1, 11):
            forecast.on_chunk(request, attempt, b"data: x\n\n", 1.0 + event * (0.010 + 0.002 * requests))
        prefill.answer(200)
        attempt.complete()
        attempt.end()
        for lease in others:
            table.loads.release(lease)
    slo = Slo(itl_s=0.0305)  # ten requests
    leases = [table.loads.charge(worker, 1) for _ in range(9)]
    assert taken(forecast, [worker], slo, now_s=3.0) is worker
    leases.append(table.loads.charge(worker, 1))
    with pytest.raises(RequestRefused, match="time between tokens would take about 32 ms, more than the 30 ms"):
        taken(forecast, [worker], slo, now_s=3.0)


def message(answer: bytes) -> tuple[str, str]:
    error = json.loads(answer)["error"]
    return error["code"], error["message"]


def holds_first(gate: asyncio.Event) -> Behaviour:
    """Answers the request "first" when the gate opens, others at once."""
    wait = later(gate)

    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (wait if body["text"] == "first" else answer_ok)(worker, request, body)

    return behave


async def test_requests_wait_their_turn_by_priority_and_the_line_is_bounded() -> None:
    gate = asyncio.Event()
    async with cluster(unified=[holds_first(gate)], max_concurrent_requests=1, queue_size=2) as c:
        jobs = [asyncio.create_task(c.post("/generate", {"text": "first"}))]
        await until(lambda: c.decodes[0].seen)
        jobs.append(asyncio.create_task(c.post("/generate", {"text": "low"})))
        await until(lambda: len(c.router.live) > 1)
        jobs.append(asyncio.create_task(c.post("/generate", {"text": "header"}, headers={"X-Priority": "3"})))
        await until(lambda: len(c.router.live) > 2)
        jobs.append(asyncio.create_task(c.post("/generate", {"text": "body", "priority": 7})))
        status, headers, answer = await jobs[1]
        assert status == 429 and headers["Retry-After"] == "1" and message(answer)[0] == "queue_full"
        gate.set()
        assert [(await job)[0] for job in (jobs[0], jobs[2], jobs[3])] == [200, 200, 200]
        assert [s.body["text"] for s in c.decodes[0].seen] == ["first", "body", "header"]
        assert c.decodes[0].seen[1].body["priority"] == 7 and c.decodes[0].seen[2].headers["x-priority"] == "3"
        assert (await c.post("/generate", {"text": "x"}, headers={"X-Priority": "soon"}))[0] == 400


@pytest.mark.parametrize(
    ("flags", "said"),
    [({"queue_size": 5, "queue_timeout_s": 0.0}, "queue_timeout"), ({}, "--max-concurrent-requests-per-client")],
)
async def test_a_client_has_its_own_limit_and_a_long_wait_is_refused(flags: dict[str, Any], said: str) -> None:
    gate = asyncio.Event()
    async with cluster(unified=[holds_first(gate)], max_concurrent_requests_per_client=1, **flags) as c:
        job = await c.begin({"text": "first"}, c.decodes[0], path="/generate")
        status, _, answer = await c.post("/generate", {"text": "second"})
        assert status == 429 and said in " ".join(message(answer))
        gate.set()
        assert (await job)[0] == 200 and (await c.post("/generate", {"text": "third"}))[0] == 200


SECONDS_PER_TOKEN = 1e-3


async def test_a_router_learns_the_law_of_its_workers_and_refuses_what_would_be_too_late() -> None:
    """The worker computes one prompt after another, a millisecond a token. Ten tokens of 100 s would be refused; nothing waits

    for them, and a slow machine only makes the law steeper.
    """
    turn = asyncio.Lock()

    async def computes(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        async with turn:
            await asyncio.sleep(SECONDS_PER_TOKEN * len(body["input_ids"]))
        return await stream(request, [{"i": i} for i in range(6)])

    def ask(tokens: int) -> dict[str, Any]:
        return {"input_ids": [1] * tokens, "stream": True}

    async with cluster(unified=1, slo_ttft_s=20.0) as c:
        worker = c.decodes[0]
        worker.behave = computes
        assert (await c.post("/generate", ask(1)))[0] == 200, "nothing is known yet"
        for size in (5, 20, 80):
            answers = await asyncio.gather(*(c.post("/generate", ask(size)) for _ in range(4)))
            assert [status for status, _, _ in answers] == [200] * 4
        count = len(worker.seen)
        status, headers, answer = await c.post("/generate", ask(200_000))
        code, text = message(answer)
        assert status == 429 and code == "slo_ttft" and int(headers["Retry-After"]) >= 1, text
        assert len(worker.seen) == count, "no worker ever saw it"
        assert (await c.post("/generate", ask(80)))[0] == 200, "nothing else is refused"
        # A client may want more, or less.
        status, _, answer = await c.post("/generate", ask(80), headers={"X-SLO-TTFT-ms": "0.01"})
        assert (status, message(answer)[0]) == (429, "slo_ttft")
        assert (await c.post("/generate", ask(80), headers={"X-SLO-ITL-ms": "fast"}))[0] == 400
        assert 'tandem_router_refused_total{why="slo_ttft"} 2.0' in await c.metrics()


def test_metrics_show_circuits_forecasts_and_waiting_requests() -> None:
    table = WorkerTable()
    known, unknown = (table.add(f"http://{name}:1", role=Role.PREFILL) for name in "ab")
    config = RouterConfig(max_concurrent_requests=1, queue_size=3)
    admission = Admission(config)
    metrics = RouterMetrics(table)
    metrics.parts.append(admission.metrics)
    ttft, itl = admission.forecast.fits(known)
    for i in range(MIN_POINTS):
        ttft.add(1000.0 * i, 0.25 + 0.5 * i, 0.0)
        itl.add(1.0 + i, 0.02 + 0.01 * i, 0.0)
    for _ in range(3):
        admission.queue.arrive("", priority=0, now_s=0.0)
    for _ in range(table.breaker.cb_failure_threshold):
        unknown.circuit.record(Event.FAULT, 0.0)
    samples = {
        row.rpartition(" ")[0]: float(row.rpartition(" ")[2])
        for row in generate_latest(metrics._registry).decode().splitlines()
        if not row.startswith("#")
    }
    of_known = '{role="prefill",url="http://a:1"}'
    assert samples["tandem_router_waiting_requests"] == 2.0
    assert samples["tandem_router_worker_circuit" + of_known] == 0.0
    assert samples['tandem_router_worker_circuit{role="prefill",url="http://b:1"}'] == 1.0
    assert samples['smg_worker_cb_state{worker="http://b:1"}'] == 1.0
    told = {
        "ttft_base_seconds": 0.25,
        "ttft_seconds_per_token": 0.0005,
        "itl_base_seconds": 0.01,
        "itl_seconds_per_request": 0.01,
    }
    for name, value in told.items():
        assert samples[f"tandem_router_worker_forecast_{name}{of_known}"] == pytest.approx(value)
        assert f'tandem_router_worker_forecast_{name}{{role="prefill",url="http://b:1"}}' not in samples
