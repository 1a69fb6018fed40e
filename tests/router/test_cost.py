"""What a request must not leave behind, or do twice, for a router to be cheap. No times are asserted: `make bench` measures."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from router.metrics import RouterMetrics
from router.pool.workers import WorkerTable
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
    lines = metrics.exposition().decode().splitlines()
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
