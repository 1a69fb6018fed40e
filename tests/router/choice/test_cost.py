"""What a request leaves behind, and what is counted of it. No times are asserted: `make bench` measures.

Counters begin at 0 with the labels that are known: `rate()` does not see the event with which a series begins.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from prometheus_client import generate_latest

from router.attempts.upstream_call import MOVED, CallFailed
from router.config import RouterConfig
from router.history.metrics import RouterMetrics
from router.parts.admission import _NAMES, Admission, TicketStatus
from router.pool.worker import PAIR, UNIFIED, Role, Way
from router.pool.workers import UnknownModel, WorkerTable
from tests.router.attempts import Launched, make_request
from tests.router.dummies import cluster

PATH = "/v1/chat/completions"


@contextmanager
def kept_garbage() -> Iterator[None]:
    """What only the collector could free is in `gc.garbage` after a `gc.collect()`."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_served_request_leaves_nothing_for_the_collector(*, stream: bool) -> None:
    """Replies, calls and attempts in a circle keep bodies, which may be large, until it comes; and it takes its time."""
    async with cluster() as c:
        body = {"model": "m", "messages": [], "stream": stream}
        for _ in range(3):  # connections are made
            assert (await c.post(PATH, body))[0] == 200
        await c.settled()
        with kept_garbage():
            for _ in range(5):
                assert (await c.post(PATH, body))[0] == 200
            await c.settled()
            gc.collect()
            names = Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.garbage)
            assert not {name: count for name, count in names.items() if name.startswith("router.")}


def test_what_requests_count_is_exposed_as_prometheus_would_count_it() -> None:
    metrics = RouterMetrics(WorkerTable())
    request = make_request()
    request.path = PATH
    attempt, *_ = Launched().pair(request)
    for seconds, status in ((0.005, 200), (0.0051, 200), (1000.0, 499)):
        metrics.on_begin()
        metrics.on_first_byte(request, attempt, seconds)
        metrics.on_answered(PATH, status, seconds)
    metrics.on_begin()
    lines = generate_latest(metrics._registry).decode().splitlines()
    for line in (
        "tandem_router_inflight_requests 1.0",
        f'tandem_router_requests_total{{path="{PATH}",status="200"}} 2.0',
        f'tandem_router_requests_total{{path="{PATH}",status="499"}} 1.0',
        f'tandem_router_ttfb_seconds_bucket{{le="0.005",path="{PATH}"}} 1.0',  # le: less or equal
        f'tandem_router_ttfb_seconds_bucket{{le="0.01",path="{PATH}"}} 2.0',
        f'tandem_router_ttfb_seconds_bucket{{le="300.0",path="{PATH}"}} 2.0',
        f'tandem_router_request_duration_seconds_bucket{{le="+Inf",path="{PATH}"}} 3.0',
        f'tandem_router_request_duration_seconds_count{{path="{PATH}"}} 3.0',
        f'smg_http_requests_total{{method="POST",path="{PATH}"}} 3.0',
        'smg_http_responses_total{method="POST",status_code="499"} 1.0',
        f'smg_http_request_duration_seconds_count{{method="POST",path="{PATH}"}} 3.0',
    ):
        assert line in lines, line


FAILURES = [*({"reason": reason} for reason in ("refused", "lost", "timeout", "down")), *({"reason": "status", "status": status} for status in (500, 502, 503))]  # fmt: skip


def series(metrics: RouterMetrics) -> dict[str, float]:
    """Values of counters that count something of requests, by name and labels."""
    lines = generate_latest(metrics._registry).decode().splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith("tandem_router_") and "_total{" in line)
    return {name: float(value) for name, _, value in found}


@pytest.mark.parametrize(
    ("ways", "missing"),
    [
        ([PAIR], {"prefill", "decode", "prefill,decode"}),
        ([UNIFIED], {"unified"}),
        ([PAIR, UNIFIED], {"prefill,unified", "decode,unified", "prefill,decode,unified"}),
    ],
    ids=["pairs", "unified", "mixed"],
)
def test_whatever_fails_was_counted_before(ways: Sequence[Way], missing: set[str]) -> None:
    table = WorkerTable()
    metrics = RouterMetrics(table, ways=ways)
    before = series(metrics)
    assert set(before.values()) == {0.0}
    lacking = {name for name in before if 'reason="no_worker"' in name}
    assert lacking == {f'tandem_router_errors_total{{reason="no_worker",role="{roles}"}}' for roles in missing}
    for role in (role for way in ways for role in way):
        worker = table.add(f"http://{role}:1", role=role)
        for failure in FAILURES:
            metrics.on_call_failed(CallFailed(worker, **failure), 0.0)
            if CallFailed(worker, **failure).retryable:
                metrics.on_retry(CallFailed(worker, **failure))
        for reason in ("lost", "down", MOVED):
            metrics.on_failover(CallFailed(worker, reason=reason), None)
    for roles in missing:
        metrics.on_no_worker([Role(role) for role in roles.split(",")])
    assert series(metrics).keys() == before.keys()
    assert len([name for name, value in series(metrics).items() if value]) > len(missing)


def test_whatever_is_refused_was_counted_before() -> None:
    metrics = RouterMetrics(WorkerTable())
    before = series(metrics)
    admission = Admission(RouterConfig(max_concurrent_requests_per_client=1))
    admission.queue.arrive("full", priority=0, now_s=0.0)
    refusals = [admission._refused(client, TicketStatus.LATE) for client in ("full", "a")]
    refusals += [admission._refused(client, TicketStatus.FULL) for client in ("full", "a")]
    whys = {"browser", "key", "rate", UnknownModel.why, *(refusal.why for refusal in refusals)}
    whys |= {f"slo_{what}" for what in _NAMES}
    for why in whys:
        metrics.on_refused(why)
    assert series(metrics).keys() == before.keys()
    named = {name.split('"')[1] for name in before if name.startswith("tandem_router_refused_total")}
    assert named == whys


def test_moves_of_a_pool_are_counted_from_0_once_it_has_a_pressure() -> None:
    metrics = RouterMetrics(WorkerTable())
    metrics.on_pressure("m", Role.DECODE, 0.5)
    moves = {name: value for name, value in series(metrics).items() if "role_moves" in name}
    wanted = ("failed", "moved", "refused")
    names = {f'tandem_router_role_moves_total{{model="m",result="{result}",to_role="decode"}}' for result in wanted}
    assert moves == dict.fromkeys(names, 0.0)


async def test_a_router_without_a_request_shows_them() -> None:
    async with cluster() as c:
        lines = await c.metrics()
    for name in (
        'tandem_router_requests_total{path="/v1/chat/completions",status="503"}',
        'tandem_router_errors_total{reason="no_worker",role="prefill,decode"}',
        'tandem_router_retries_total{reason="lost"}',
        'tandem_router_refused_total{why="queue_full"}',
        'tandem_router_failovers_total{reason="lost",result="went_on"}',
        'tandem_router_images_total{encoder="none"}',
        'smg_http_responses_total{method="POST",status_code="502"}',
    ):
        assert f"{name} 0.0" in lines, name
