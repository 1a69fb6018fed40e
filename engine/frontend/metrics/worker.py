"""Prometheus metrics of a worker: client-side counts, and the schedulers' reports."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.frontend.metrics.schedulers import LABELS, SchedulersCollector
from engine.messages import StateReply, StepReply
from engine.metric_names import VLLM_NAMES, VLLM_STAGES
from engine.text.sample import TextOutput
from service.http.reconnect import StreamLogs

M = TypeVar("M", Counter, Gauge, Histogram)

TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
ITL_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.8, 1, 2, 4, 8)  # fmt: skip
E2E_S = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200)

# Known labels start at 0, because `rate()` misses the event that creates a series.
FINISHES = ("stop", "length", "abort", "error", "moved")
STATUSES = (200, 400, 499, 500, 503)
STAGES = ("bootstrap_time", "queue_time", "prefill_time", "transfer_time", "decode_time")


class Metrics:
    """Implements `SampleObserver`."""

    def __init__(self, *, model_name: str, mode: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._label_values = (model_name, "unified" if mode == "null" else mode)
        self._schedulers = SchedulersCollector(self._label_values)
        self.registry.register(self._schedulers)
        self._prompt_tokens = self._one(Counter, "sglang:prompt_tokens", "prompt tokens of accepted requests")
        labels = dict(zip(LABELS, self._label_values, strict=True))
        self._generation_tokens = PlainCounter("sglang:generation_tokens", "generated tokens", labels)
        self._show(self._generation_tokens, "sglang:generation_tokens")
        self._cached_tokens = self._one(Counter, "sglang:cached_tokens", "prompt tokens whose KV was reused")
        self._requests = self._one(Counter, "sglang:num_requests", "accepted requests")
        self._aborted = self._one(Counter, "sglang:num_aborted_requests", "requests that were aborted or failed")
        help = "requests refused because they would have come too late"
        self._rejected = self._one(Counter, "tandem_num_early_rejections", help)
        help = "requests that ended, by the reason"
        self._finished = self._family(Counter, "vllm:request_success", help, "finished_reason")
        for reason in FINISHES:
            self._finished.labels(*self._label_values, reason)
        self._http_requests = self._family(Counter, "sglang:http_requests", "HTTP requests", "endpoint", "method")
        help = "HTTP answers (499: the client went away)"
        self._http_responses = self._family(Counter, "sglang:http_responses", help, "endpoint", "method", "status_code")
        self._http_active = self._one(Gauge, "sglang:http_requests_active", "HTTP requests in progress")
        self._ttft = self._one(Histogram, "sglang:time_to_first_token_seconds", "time to the first token", TTFT_S)
        name = "sglang:inter_token_latency_seconds"
        self._itl = PlainHistogram(name, "time between tokens", labels, ITL_S)
        self._show(self._itl, name)
        help = "time between arrival and first step"
        self._queue = self._one(Histogram, "sglang:queue_time_seconds", help, E2E_S)
        name = "sglang:per_stage_req_latency_seconds"
        self._stages = self._family(Histogram, name, "time in each stage", "stage", buckets=E2E_S)
        help = "time from request to last token"
        self._e2e = self._one(Histogram, "sglang:e2e_request_latency_seconds", help, E2E_S)
        help = "mean time of a request's tokens after its first"
        self._tpot = self._one(Histogram, "sglang:request_time_per_output_token_seconds", help, ITL_S)
        for stage, name in VLLM_STAGES.items():
            self.registry.register(_Alias(self._stages, name, stage=stage))

    def show_kept(self, streams: StreamLogs) -> None:
        help = "streams kept for clients whose connection breaks"
        self._one(Gauge, "tandem_kept_streams", help).set_function(lambda: len(streams))
        self._one(Gauge, "tandem_kept_stream_bytes", "bytes of these").set_function(lambda: streams.num_bytes)

    def expect(self, endpoint: str, method: str) -> None:
        """Start an endpoint's counters at 0."""
        self._http_requests.labels(*self._label_values, endpoint, method)
        for status in STATUSES:
            self._http_responses.labels(*self._label_values, endpoint, method, str(status))

    def on_start(self, num_prompt_tokens: int) -> None:
        self._requests.inc()
        self._prompt_tokens.inc(num_prompt_tokens)

    def on_reject(self) -> None:
        self._rejected.inc()

    def on_tokens(self, *, num_tokens: int, gap_s: float, first: bool) -> None:
        self._generation_tokens.value += num_tokens
        if first:
            self._ttft.observe(gap_s)
        else:
            self._itl.observe(gap_s / num_tokens, num_tokens)

    def on_end(self, output: TextOutput | None, *, elapsed_s: float) -> None:
        """`output`: with the finish, None if the client left."""
        self._finished.labels(*self._label_values, _finish_of(output)).inc()
        if output is None or output.tokens.finish is None or output.tokens.finish.kind == "abort":
            self._aborted.inc()
            return
        if not output.tokens.ends:  # another worker does
            return
        self._cached_tokens.inc(output.tokens.cached_tokens)
        self._observe_stages(output.tokens.times)
        self._e2e.observe(elapsed_s)
        if throughput := output.tokens.times.get("decode_throughput"):
            self._tpot.observe(1 / throughput)

    def on_http(self, endpoint: str, method: str) -> None:
        self._http_requests.labels(*self._label_values, endpoint, method).inc()
        self._http_active.inc()

    def on_http_end(self, endpoint: str, method: str, status: int) -> None:
        self._http_responses.labels(*self._label_values, endpoint, method, str(status)).inc()
        self._http_active.dec()

    def _observe_stages(self, times: dict[str, float]) -> None:
        for stage in STAGES:
            if stage in times:
                self._stages.labels(*self._label_values, stage.removesuffix("_time")).observe(times[stage])
        if "queue_time" in times:
            self._queue.observe(times["queue_time"])

    def exposition(self, states: Sequence[StateReply] = (), steps: Sequence[StepReply] = ()) -> bytes:
        """`states`, `steps`: by DP rank, empty if unavailable."""
        self._schedulers.states, self._schedulers.steps = states, steps
        return generate_latest(self.registry)

    def _family(self, kind: type[M], name: str, help: str, *labels: str, **options: Any) -> M:
        return kind(name, help, (*LABELS, *labels), registry=self.registry, **options)

    def _one(self, kind: type[M], name: str, help: str, buckets: tuple[float, ...] | None = None) -> M:
        family = self._family(kind, name, help, **({} if buckets is None else {"buckets": buckets}))
        self._alias(family, name)
        return family.labels(*self._label_values)

    def _show(self, family: Collector, name: str) -> None:
        self.registry.register(family)
        self._alias(family, name)

    def _alias(self, family: Collector, name: str) -> None:
        if name in VLLM_NAMES:
            self.registry.register(_Alias(family, VLLM_NAMES[name]))


# ---- Lock-free counter and histogram; prometheus_client's take a lock per token.


class PlainCounter(Collector):
    """One series; single-threaded writer."""

    def __init__(self, name: str, help: str, labels: Mapping[str, str]) -> None:
        self.value = 0
        self._head = (name, help)
        self._labels = labels

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(*self._head, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self.value)
        yield family


class PlainHistogram(Collector):
    """One series; single-threaded writer. `bounds`: ascending, without the infinite one."""

    def __init__(self, name: str, help: str, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        self._head = (name, help)
        self._labels = labels
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(*self._head, labels=list(self._labels))
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family


# ---- Series made at each scrape.


class _Alias(Collector):
    """`family` under another `name`; with `stage` only that label's samples.

    It copies at each scrape.
    """

    def __init__(self, family: Collector, name: str, *, stage: str | None = None) -> None:
        self._family = family
        self._name = name
        self._stage = stage

    def collect(self) -> Iterator[Metric]:
        for metric in self._family.collect():
            alias = Metric(self._name, metric.documentation, metric.type)
            alias.samples = [
                s._replace(
                    name=self._name + s.name.removeprefix(metric.name),
                    labels={k: v for k, v in s.labels.items() if k != "stage"},
                )
                for s in metric.samples
                if self._stage in (None, s.labels.get("stage"))
            ]
            yield alias


def _finish_of(output: TextOutput | None) -> str:
    finish = None if output is None else output.tokens.finish
    if finish is None:
        return "abort"
    return "error" if finish.status else finish.kind
