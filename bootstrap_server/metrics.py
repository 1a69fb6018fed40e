"""Prometheus metrics of a bootstrap server."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bootstrap_server.registry import Registry

STATUSES = (200, 400, 401, 404, 500, 503)


class BootstrapMetrics:
    def __init__(self, registry: Registry, num_refused: Callable[[], int]) -> None:
        self._metrics = CollectorRegistry(auto_describe=False)
        self._metrics.register(_Registered(registry, num_refused))
        self._calls = Counter(
            "tandem_bootstrap_calls", "calls that were answered", ["call", "status"], registry=self._metrics
        )

    def expect(self, call: str) -> None:
        """Start a call's series at 0, as `rate()` misses the first event."""
        for status in STATUSES:
            self._calls.labels(call, str(status))

    def on_answered(self, call: str, status: int) -> None:
        self._calls.labels(call, str(status)).inc()

    def exposition(self) -> bytes:
        return generate_latest(self._metrics)


class _Registered(Collector):
    def __init__(self, registry: Registry, num_refused: Callable[[], int]) -> None:
        self._registry = registry
        self._num_refused = num_refused

    def collect(self) -> Iterator[Metric]:
        workers, rooms = float(self._registry.num_workers), float(self._registry.num_rooms)
        yield GaugeMetricFamily("tandem_bootstrap_workers", "prefill workers that are registered", workers)
        yield GaugeMetricFamily("tandem_bootstrap_rooms", "rooms whose owner is known", rooms)
        refused = "calls refused: not signed with the cluster's secret"
        yield CounterMetricFamily("tandem_bootstrap_refused", refused, float(self._num_refused()))
