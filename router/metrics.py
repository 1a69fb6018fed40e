"""The router's Prometheus metrics, in a registry of their own. Owns counters; reads the worker table when scraped.

Beside `tandem_router_*` stand the names of SGLang's router (`smg_*`) for the same quantities, made when somebody scrapes.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.pool.workers import Health, Worker, WorkerTable

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Caches(Protocol):
    """What is known of workers' prefix caches; None: nothing is asked of this one."""

    def num_prefixes(self, worker: Worker) -> int | None: ...

    def num_event_tokens(self, worker: Worker) -> int | None: ...

    def num_event_gaps(self, worker: Worker) -> int | None: ...


class RouterMetrics:
    """What happened to requests; `exposition()` is the text of /metrics."""

    def __init__(self, table: WorkerTable, caches: "Caches | None" = None) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.requests = Counter(
            "tandem_router_requests",
            "Requests answered, by path and HTTP status",
            ["path", "status"],
            registry=registry,
        )
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
        self.inflight = Gauge("tandem_router_inflight_requests", "Requests being served", registry=registry)
        self.ttfb_s = Histogram(
            "tandem_router_ttfb_seconds",
            "From a request's arrival to the first byte of its answer",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.duration_s = Histogram(
            "tandem_router_request_duration_seconds",
            "From a request's arrival to the end of its answer",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._registry.register(_WorkerCollector(table, caches))
        self._registry.register(_SglangNames(self.requests, self.duration_s, table))
        self._answered: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self._first_byte: dict[str, Histogram] = {}

    def on_answered(self, path: str, status: str, seconds: float) -> None:
        """A request ended. `path`: one of few; children are kept, finding one takes longer than counting."""
        children = self._answered.get((path, status))
        if children is None:
            children = self.requests.labels(path, status), self.duration_s.labels(path)
            self._answered[path, status] = children
        children[0].inc()
        children[1].observe(seconds)

    def on_first_byte(self, path: str, seconds: float) -> None:
        """A request's answer began."""
        child = self._first_byte.get(path)
        if child is None:
            child = self._first_byte[path] = self.ttfb_s.labels(path)
        child.observe(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class _WorkerCollector(Collector):
    def __init__(self, table: WorkerTable, caches: Caches | None) -> None:
        self._table = table
        self._caches = caches

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield self._family("worker_up", "1: the worker gets requests", lambda w: w.health is Health.UP)
        yield self._family("worker_inflight_requests", "Requests this router has there", lambda w: w.inflight_requests)
        yield self._family("worker_inflight_tokens", "Tokens this router has there", lambda w: w.inflight_tokens)
        yield self._family("worker_load_tokens", "Tokens that least_load compares", lambda w: w.load_tokens)
        yield self._family("worker_assigned", "Requests it was given so far", lambda w: w.assigned_total)
        if self._caches is not None:
            caches = self._caches
            yield self._family("worker_prefix_blocks", "Prefixes of prompts known to be there", caches.num_prefixes)
            yield self._family("worker_kv_event_tokens", "Tokens it caches, by KV events", caches.num_event_tokens)
            yield self._family("worker_kv_event_gaps", "Times that KV events were lost", caches.num_event_gaps)

    def _family(self, name: str, text: str, value: Callable[[Worker], float | None]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"tandem_router_{name}", text, labels=["url", "role"])
        for worker in self._table.workers():
            number = value(worker)
            if number is not None:
                family.add_metric([worker.url, worker.role.value], float(number))
        return family


class _SglangNames(Collector):
    """What SGLang's router 0.3.2 exports, under its labels; of its paths those that generate."""

    def __init__(self, requests: Counter, duration_s: Histogram, table: WorkerTable) -> None:
        self._requests = requests
        self._duration_s = duration_s
        self._table = table

    def collect(self) -> Iterator[Metric]:
        yield self._total("smg_http_requests", "HTTP requests by method and path", "path")
        yield self._total("smg_http_responses", "HTTP answers by status", "status", shown="status_code")
        yield self._durations()
        workers = self._table.workers()
        yield self._of_workers("smg_worker_health", "1: healthy", lambda w: w.health is Health.UP)
        yield self._of_workers("smg_worker_requests_active", "requests it has", lambda w: w.inflight_requests)
        pool = GaugeMetricFamily("smg_worker_pool_size", "workers by role", labels=["worker_type"])
        for role in sorted({w.role.value for w in workers}):
            pool.add_metric([role], sum(w.role.value == role for w in workers))
        yield pool

    def _total(self, name: str, text: str, label: str, *, shown: str = "") -> CounterMetricFamily:
        """`requests`, summed over its other label."""
        family = CounterMetricFamily(name, text, labels=["method", shown or label])
        totals: dict[str, float] = {}
        for sample in next(iter(self._requests.collect())).samples:
            if sample.name.endswith("_total"):
                totals[sample.labels[label]] = totals.get(sample.labels[label], 0.0) + sample.value
        for value, total in sorted(totals.items()):
            family.add_metric(["POST", value], total)
        return family

    def _durations(self) -> Metric:
        family = HistogramMetricFamily("smg_http_request_duration_seconds", "arrival to the end of the answer")
        for sample in next(iter(self._duration_s.collect())).samples:
            if not sample.name.endswith("_created"):
                name = family.name + sample.name.removeprefix("tandem_router_request_duration_seconds")
                family.samples.append(sample._replace(name=name, labels={"method": "POST", **sample.labels}))
        return family

    def _of_workers(self, name: str, text: str, value: Callable[[Worker], float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["worker"])
        for worker in self._table.workers():
            family.add_metric([worker.url], float(value(worker)))
        return family
