"""Prometheus metrics, also under the names of SGLang's router (`smg_*`)."""

import asyncio
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, combinations, product

from fastapi import Response
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.attempts.pair_attempt import PairAttempt
from router.attempts.request import RequestContext
from router.attempts.upstream_call import MOVED, CallFailed
from router.body import Api
from router.choice.kv_feed import KVEventFeed
from router.pool.breaker import State
from router.pool.worker import Role, Way, Worker
from router.pool.workers import WorkerTable
from service.http.guard import CLIENT_GONE, answer_of
from service.http.request import Handler, HttpRequest

CIRCUITS = {State.CLOSED: 0, State.OPEN: 1, State.HALF_OPEN: 2}
# Label values whose series start at 0: `rate()` misses the event that creates a series.
_FAULTS = ("refused", "lost", "timeout", "down", "http_500", "http_502", "http_503")
_REFUSALS = ("browser", "client_limit", "key", "model", "queue_full", "queue_timeout", "rate", "slo_itl", "slo_ttft")
_RETRIED = ("refused", "lost", "down", "status", MOVED)
_FAILOVERS = (*((reason, end) for reason in ("lost", "down", MOVED) for end in ("went_on", "ended")), (MOVED, "moved"))
_MOVES = ("moved", "refused", "failed")
_STATUSES = (200, 400, 429, CLIENT_GONE, 500, 502, 503, 504)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_BOUNDS = (*(str(float(bound)) for bound in _SECONDS), "+Inf")

WorkerValue = Callable[[Worker], float | None]
MetricsPart = Callable[[Sequence[Worker]], Iterable[Metric]]


class RouterMetrics(Collector):
    """Counters, and gauges read at each scrape.

    Counts per request are plain numbers: the library's take a lock and eight calls.
    """

    def __init__(self, table: WorkerTable, *, ways: Sequence[Way] = ()) -> None:
        self.parts: list[MetricsPart] = []  # what features count
        self._table = table
        self._inflight = 0
        self._answered: Counts[tuple[str, int]] = Counts()  # by path and status
        self._ttfb_s = _Seconds()
        self._duration_s = _Seconds()
        self._registry = registry = CollectorRegistry()
        count = partial(Counter, registry=registry)
        self.errors = count("tandem_router_errors", "Failures seen while serving requests", ["reason", "role"])
        self.refused = count("tandem_router_refused", "Requests refused before they were read", ["why"])
        self.retries = count("tandem_router_retries", "Attempts after the first one", ["reason"])
        failovers = "Streams whose worker was lost or let them go: they moved with their KV, went on through a pair, or ended with an error"
        self.failovers = count("tandem_router_failovers", failovers, ["reason", "result"])
        moves = "Moves of workers between the pools (--auto-roles), by how they ended"
        self.role_moves = count("tandem_router_role_moves", moves, ["model", "to_role", "result"])
        pressure = "Work of a pool, counted in workers, over its workers (--auto-roles); 1: as much as it can bear"
        self.role_pressure = Gauge("tandem_router_role_pressure", pressure, ["model", "role"], registry=registry)
        registry.register(self)
        self._begin_at_zero(ways)

    def _begin_at_zero(self, ways: Sequence[Way]) -> None:
        for counter, values in ((self.refused, _REFUSALS), (self.retries, _RETRIED)):
            for value in values:
                counter.labels(value)
        for labels in _FAILOVERS:
            self.failovers.labels(*labels)
        for role in chain.from_iterable(ways):
            for reason in _FAULTS:
                self.errors.labels(reason, role.value)
        for missing in _what_may_be_missing(ways):
            self.errors.labels("no_worker", ",".join(missing))
        self._answered.update({(api.value, status): 0 for api in Api for status in _STATUSES})

    def on_refused(self, why: str) -> None:
        self.refused.labels(why).inc()

    def on_call_failed(self, failure: CallFailed, now_s: float) -> None:
        self.errors.labels(failure.label, failure.worker.role.value).inc()

    def on_no_worker(self, missing: list[Role]) -> None:
        self.errors.labels("no_worker", ",".join(missing)).inc()

    def on_retry(self, failure: CallFailed) -> None:
        self.retries.labels(failure.reason).inc()

    def on_pressure(self, model: str, role: Role, pressure: float) -> None:
        self.role_pressure.labels(model, role.value).set(pressure)
        for result in _MOVES:
            self.role_moves.labels(model, role.value, result)

    def on_failover(self, failure: CallFailed, attempt: PairAttempt | None) -> None:
        by_kv = attempt is not None and failure.reason == MOVED and attempt.prefill is None
        result = "ended" if attempt is None else "moved" if by_kv else "went_on"
        self.failovers.labels(failure.label, result).inc()

    def on_first_byte(self, request: RequestContext, attempt: PairAttempt, now_s: float) -> None:
        self._ttfb_s.observe(request.path, now_s - request.started_s)

    def on_begin(self) -> None:
        self._inflight += 1

    def on_answered(self, path: str, status: int, seconds: float) -> None:
        self._inflight -= 1
        self._answered[path, status] += 1
        self._duration_s.observe(path, seconds)

    async def scrape(self) -> bytes:
        """`generate_latest`, yielding in between (50 ms for a thousand workers)."""
        parts = []
        for family in self._registry.collect():
            parts.append(generate_latest(_OneFamily(family)))
            await asyncio.sleep(0)
        return b"".join(parts)

    def collect(self) -> Iterator[Metric]:
        workers = self._table.workers()
        answered = CounterMetricFamily(
            "tandem_router_requests", "Requests answered, by path and HTTP status", labels=["path", "status"]
        )
        for (path, status), count in self._answered.items():
            answered.add_metric([path, str(status)], count)
        yield answered
        yield GaugeMetricFamily("tandem_router_inflight_requests", "Requests being served", value=self._inflight)
        began = "From a request's arrival to the first byte of its answer"
        yield self._ttfb_s.family("tandem_router_ttfb_seconds", began)
        ended = "From a request's arrival to the end of its answer"
        yield self._duration_s.family("tandem_router_request_duration_seconds", ended)
        for name, text, value in _WORKER_VALUES:
            yield by_worker(workers, name, text, value)
        for part in self.parts:
            yield from part(workers)
        yield from self._sglang_names(workers)

    def _sglang_names(self, workers: Sequence[Worker]) -> Iterator[Metric]:
        paths, statuses = Counts[str](), Counts[str]()
        for (path, status), count in self._answered.items():
            paths[path] += count
            statuses[str(status)] += count
        yield _posts("smg_http_requests", "HTTP requests by method and path", "path", paths)
        yield _posts("smg_http_responses", "HTTP answers by status", "status_code", statuses)
        text = "arrival to the end of the answer"
        yield self._duration_s.family("smg_http_request_duration_seconds", text, method="POST")
        for name, text, value in _SGLANG_WORKER_VALUES:
            family = GaugeMetricFamily(name, text, labels=["worker"])
            for worker in workers:
                family.add_metric([worker.url], float(value(worker)))
            yield family
        pool = GaugeMetricFamily("smg_worker_pool_size", "workers by role", labels=["worker_type"])
        for role, count in sorted(Counts(worker.role.value for worker in workers).items()):
            pool.add_metric([role], count)
        yield pool


def _what_may_be_missing(ways: Sequence[Way]) -> Iterator[tuple[Role, ...]]:
    lacks = [[lack for size in range(1, len(way) + 1) for lack in combinations(way, size)] for way in ways]
    for of_each in product(*lacks) if ways else ():
        yield tuple(chain.from_iterable(of_each))


class _OneFamily(CollectorRegistry):
    def __init__(self, family: Metric) -> None:
        super().__init__(auto_describe=False)
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def counted(handler: Handler, metrics: RouterMetrics) -> Handler:
    """Count a handler's requests, 499 if the client left."""

    async def handle(request: HttpRequest) -> Response:
        started_s, status = time.monotonic(), CLIENT_GONE
        metrics.on_begin()
        try:
            response = await answer_of(handler, request)
            status = response.status_code
            return response
        finally:
            metrics.on_answered(request.path, status, time.monotonic() - started_s)

    return handle


class _Seconds:
    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}  # by bucket, the last unbounded
        self._sums: dict[str, float] = {}

    def observe(self, path: str, seconds: float) -> None:
        counts = self._counts.get(path)
        if counts is None:
            counts = self._counts[path] = [0] * (len(_SECONDS) + 1)
            self._sums[path] = 0.0
        counts[bisect_left(_SECONDS, seconds)] += 1
        self._sums[path] += seconds

    def family(self, name: str, text: str, **labels: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=[*labels, "path"])
        for path, counts in self._counts.items():
            buckets = zip(_BOUNDS, accumulate(counts), strict=True)
            family.add_metric([*labels.values(), path], [*buckets], self._sums[path])
        return family


_WORKER_VALUES: tuple[tuple[str, str, WorkerValue], ...] = (
    ("up", "1: the worker gets requests", lambda w: w.answers),
    ("inflight_requests", "Requests this router has there", lambda w: w.inflight_requests),
    ("inflight_tokens", "Tokens this router has there", lambda w: w.inflight_tokens),
    ("load_tokens", "Tokens that least_load compares", lambda w: w.load_tokens),
    ("assigned", "Requests it was given so far", lambda w: w.assigned_total),
    ("circuit", "Its circuit breaker: 0 closed, 1 open, 2 half open", lambda w: CIRCUITS[w.circuit.state]),
)
_SGLANG_WORKER_VALUES: tuple[tuple[str, str, Callable[[Worker], float]], ...] = (
    ("smg_worker_health", "1: healthy", lambda w: w.answers),
    ("smg_worker_cb_state", "circuit breaker", lambda w: CIRCUITS[w.circuit.state]),
    ("smg_worker_requests_active", "requests it has", lambda w: w.inflight_requests),
)


def of_feed(feed: KVEventFeed, workers: Sequence[Worker]) -> Iterator[Metric]:
    views = {worker: view for worker in workers if (view := feed.view_of(worker)) is not None}
    yield by_worker(workers, "prefix_blocks", "Prefixes of prompts known to be there", feed.num_prefixes)
    yield by_worker(views, "kv_event_tokens", "Tokens it caches, by KV events", lambda w: views[w].num_tokens)
    yield by_worker(views, "kv_event_gaps", "Times that KV events were lost", lambda w: views[w].num_gaps)


def by_worker(workers: Iterable[Worker], name: str, text: str, value: WorkerValue) -> Metric:
    family = GaugeMetricFamily(f"tandem_router_worker_{name}", text, labels=["url", "role"])
    for worker in workers:
        number = value(worker)
        if number is not None:
            family.add_metric([worker.url, worker.role.value], float(number))
    return family


def _posts(name: str, text: str, label: str, counts: Counts[str]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["method", label])
    for value, count in sorted(counts.items()):
        family.add_metric(["POST", value], count)
    return family
