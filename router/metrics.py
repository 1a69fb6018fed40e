"""The router's Prometheus metrics, in a registry of their own. Owns counters; reads the worker table when scraped.

Beside `tandem_router_*` stand the names of SGLang's router (`smg_*`) for the same quantities, made at each scrape.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.admission.admission import Admission
from router.admission.forecast import LineFit
from router.attempts.events import RequestObserver
from router.attempts.pair_attempt import PairAttempt
from router.attempts.request import RequestContext
from router.attempts.upstream_call import CallFailed
from router.pool.breaker import State
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from service.http.guard import CLIENT_GONE, answer_of
from service.http.routes import Handler

CIRCUITS = {State.CLOSED: 0, State.OPEN: 1, State.HALF_OPEN: 2}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


_BOUNDS = (*(str(float(bound)) for bound in _SECONDS), "+Inf")


class Caches(Protocol):
    """What is known of workers' prefix caches; None: nothing is asked of this one."""

    def num_prefixes(self, worker: Worker) -> int | None: ...

    def num_event_tokens(self, worker: Worker) -> int | None: ...

    def num_event_gaps(self, worker: Worker) -> int | None: ...


class RouterMetrics(RequestObserver):
    """Counts what happens to requests; `exposition()` is the text of /metrics."""

    def __init__(self, table: WorkerTable, caches: "Caches | None" = None) -> None:
        self._table = table
        self._registry = CollectorRegistry()
        registry = self._registry
        self.errors = Counter(
            "tandem_router_errors", "Failures seen while serving requests", ["reason", "role"], registry=registry
        )
        self.refused = Counter(
            "tandem_router_refused", "Requests refused before they were read", ["why"], registry=registry
        )
        self.retries = Counter("tandem_router_retries", "Attempts after the first one", ["reason"], registry=registry)
        self.role_moves = Counter(
            "tandem_router_role_moves",
            "Moves of workers between the pools (--auto-roles), by how they ended",
            ["model", "to_role", "result"],
            registry=registry,
        )
        self.role_pressure = Gauge(
            "tandem_router_role_pressure",
            "Work of a pool, counted in workers, over its workers (--auto-roles); 1: as much as it can bear",
            ["model", "role"],
            registry=registry,
        )
        self.hedges = Counter(
            "tandem_router_hedges",
            "Second attempts beside a silent first one: started; won, or lost to it",
            ["what"],
            registry=registry,
        )
        self.hedges_withheld = Counter(
            "tandem_router_hedges_withheld",
            "Requests that were due for a hedge and got none",
            ["why"],
            registry=registry,
        )
        self._tally = _Tally()
        registry.register(self._tally)
        registry.register(_WorkerCollector(table, caches))
        registry.register(_SglangNames(self._tally, table))

    def show_admission(self, admission: Admission) -> None:
        """Export the queue and the forecasts, too."""
        self._registry.register(_AdmissionCollector(admission, self._table))

    def on_refused(self, why: str) -> None:
        self.refused.labels(why).inc()

    def on_call_failed(self, failure: CallFailed, now_s: float) -> None:
        self.errors.labels(failure.label, failure.worker.role.value).inc()

    def on_no_worker(self, request: RequestContext, missing: list[Role]) -> None:
        self.errors.labels("no_worker", ",".join(missing)).inc()

    def on_retry(self, request: RequestContext, failure: CallFailed) -> None:
        self.retries.labels(failure.reason).inc()

    def on_first_byte(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        self._tally.ttfb_s.observe(request.path, now_s - request.started_s)

    def on_begin(self) -> None:
        """A request came."""
        self._tally.inflight += 1

    def on_answered(self, path: str, status: int, seconds: float) -> None:
        """It ended. `path`: one of few."""
        tally = self._tally
        tally.inflight -= 1
        tally.answered[path, status] = tally.answered.get((path, status), 0) + 1
        tally.duration_s.observe(path, seconds)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


def counted(handler: Handler, metrics: RouterMetrics) -> Handler:
    """A generation request; one whose client went away counts as status 499."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        started_s, status = time.monotonic(), CLIENT_GONE
        metrics.on_begin()
        try:
            response = await answer_of(handler, request)
            status = response.status
            return response
        finally:
            metrics.on_answered(request.path, status, time.monotonic() - started_s)

    return handle


class _Seconds:
    """A histogram by path."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}  # by bucket, the last one: longer than all
        self._sums: dict[str, float] = {}

    def observe(self, path: str, seconds: float) -> None:
        counts = self._counts.get(path)
        if counts is None:
            counts = self._counts[path] = [0] * (len(_SECONDS) + 1)
            self._sums[path] = 0.0
        counts[bisect_left(_SECONDS, seconds)] += 1
        self._sums[path] += seconds

    def family(self, name: str, text: str, **labels: str) -> HistogramMetricFamily:
        """`labels`: on every sample, before its path."""
        family = HistogramMetricFamily(name, text, labels=[*labels, "path"])
        for path, counts in self._counts.items():
            buckets = zip(_BOUNDS, accumulate(counts), strict=True)
            family.add_metric([*labels.values(), path], [*buckets], self._sums[path])
        return family


class _Tally(Collector):
    """What every request counts. Plain numbers: the library's own counters take a lock and eight calls for each."""

    def __init__(self) -> None:
        self.inflight = 0
        self.answered: dict[tuple[str, int], int] = {}
        self.ttfb_s = _Seconds()
        self.duration_s = _Seconds()

    def collect(self) -> Iterator[Metric]:
        answered = CounterMetricFamily(
            "tandem_router_requests", "Requests answered, by path and HTTP status", labels=["path", "status"]
        )
        for (path, status), count in self.answered.items():
            answered.add_metric([path, str(status)], count)
        yield answered
        yield GaugeMetricFamily("tandem_router_inflight_requests", "Requests being served", value=self.inflight)
        began = "From a request's arrival to the first byte of its answer"
        yield self.ttfb_s.family("tandem_router_ttfb_seconds", began)
        ended = "From a request's arrival to the end of its answer"
        yield self.duration_s.family("tandem_router_request_duration_seconds", ended)


class _WorkerCollector(Collector):
    def __init__(self, table: WorkerTable, caches: Caches | None) -> None:
        self._table = table
        self._caches = caches

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield self._family("worker_up", "1: the worker gets requests", lambda w: w.answers)
        yield self._family("worker_inflight_requests", "Requests this router has there", lambda w: w.inflight_requests)
        yield self._family("worker_inflight_tokens", "Tokens this router has there", lambda w: w.inflight_tokens)
        yield self._family("worker_load_tokens", "Tokens that least_load compares", lambda w: w.load_tokens)
        yield self._family("worker_assigned", "Requests it was given so far", lambda w: w.assigned_total)
        yield self._family(
            "worker_circuit", "Its circuit breaker: 0 closed, 1 open, 2 half open", lambda w: CIRCUITS[w.circuit.state]
        )
        if self._caches is not None:
            caches = self._caches
            yield self._family("worker_prefix_blocks", "Prefixes of prompts known to be there", caches.num_prefixes)
            yield self._family("worker_kv_event_tokens", "Tokens it caches, by KV events", caches.num_event_tokens)
            yield self._family("worker_kv_event_gaps", "Times that KV events were lost", caches.num_event_gaps)

    def _family(self, name: str, text: str, value: Callable[[Worker], float | None]) -> GaugeMetricFamily:
        return _of_workers(self._table, name, text, value)


class _AdmissionCollector(Collector):
    """The admission queue, and the two fitted lines of each worker (admission/forecast.py)."""

    def __init__(self, admission: Admission, table: WorkerTable) -> None:
        self._fits = admission.forecast.fits
        self._admission = admission
        self._table = table

    def collect(self) -> Iterator[GaugeMetricFamily]:
        fits = self._fits
        waiting = GaugeMetricFamily(
            "tandem_router_waiting_requests", "Requests that wait for their turn (--queue-size)"
        )
        waiting.add_metric([], self._admission.num_waiting)
        yield waiting
        for name, text, value in (
            ("ttft_base_seconds", "Foretold TTFT with nothing to compute", lambda w: _known(fits(w)[0], "intercept")),
            ("ttft_seconds_per_token", "... and for each token ahead", lambda w: _known(fits(w)[0], "slope")),
            ("itl_base_seconds", "Foretold time between events, alone", lambda w: _known(fits(w)[1], "intercept")),
            ("itl_seconds_per_request", "... and for each request there", lambda w: _known(fits(w)[1], "slope")),
        ):
            yield _of_workers(self._table, f"worker_forecast_{name}", text, value)


def _known(fit: LineFit, what: str) -> float | None:
    return getattr(fit, what) if fit.is_known else None


def _of_workers(table: WorkerTable, name: str, text: str, value: Callable[[Worker], float | None]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"tandem_router_{name}", text, labels=["url", "role"])
    for worker in table.workers():
        number = value(worker)
        if number is not None:
            family.add_metric([worker.url, worker.role.value], float(number))
    return family


class _SglangNames(Collector):
    """What SGLang's router 0.3.2 exports, under its labels; of its paths those that generate."""

    def __init__(self, tally: _Tally, table: WorkerTable) -> None:
        self._tally = tally
        self._table = table

    def collect(self) -> Iterator[Metric]:
        answered = self._tally.answered.items()
        yield _total(
            "smg_http_requests", "HTTP requests by method and path", "path", ((p, n) for (p, _), n in answered)
        )
        by_status = ((str(status), count) for (_, status), count in answered)
        yield _total("smg_http_responses", "HTTP answers by status", "status_code", by_status)
        text = "arrival to the end of the answer"
        yield self._tally.duration_s.family("smg_http_request_duration_seconds", text, method="POST")
        workers = self._table.workers()
        yield self._of_workers("smg_worker_health", "1: healthy", lambda w: w.answers)
        yield self._of_workers("smg_worker_cb_state", "circuit breaker", lambda w: CIRCUITS[w.circuit.state])
        yield self._of_workers("smg_worker_requests_active", "requests it has", lambda w: w.inflight_requests)
        pool = GaugeMetricFamily("smg_worker_pool_size", "workers by role", labels=["worker_type"])
        for role in sorted({w.role.value for w in workers}):
            pool.add_metric([role], sum(w.role.value == role for w in workers))
        yield pool

    def _of_workers(self, name: str, text: str, value: Callable[[Worker], float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["worker"])
        for worker in self._table.workers():
            family.add_metric([worker.url], float(value(worker)))
        return family


def _total(name: str, text: str, label: str, counts: Iterable[tuple[str, int]]) -> CounterMetricFamily:
    """Counts with the same label added up."""
    family = CounterMetricFamily(name, text, labels=["method", label])
    totals: dict[str, int] = {}
    for value, count in counts:
        totals[value] = totals.get(value, 0) + count
    for value, total in sorted(totals.items()):
        family.add_metric(["POST", value], total)
    return family
