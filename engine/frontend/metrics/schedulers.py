"""Prometheus series from the schedulers' reports, made at each scrape."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.messages import StateReply, StepReply
from engine.metric_names import COUNTERS, LEVELS, QUEUES, Figure, gauge_of, num_waiting

R = TypeVar("R")

LABELS = ("model_name", "engine_type")


class SchedulersCollector(Collector):
    """Several ranks have the label `dp_rank`, as in SGLang."""

    def __init__(self, label_values: tuple[str, str]) -> None:
        self.states: Sequence[StateReply] = ()
        self.steps: Sequence[StepReply] = ()
        self._label_values = label_values

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        num_ranks = max(len(self.states), len(self.steps))
        for rank in range(num_ranks):
            labels = {} if num_ranks == 1 else {"dp_rank": str(rank)}
            figures = _Figures(self._label_values, labels)
            for family in figures.of(_at(self.states, rank), _at(self.steps, rank)):
                if family.name in found:
                    found[family.name].samples += family.samples
                else:
                    found[family.name] = family
        return found.values()


def _at(reports: Sequence[R], rank: int) -> R | None:
    return reports[rank] if rank < len(reports) else None


class _Figures:
    def __init__(self, label_values: tuple[str, str], labels: Mapping[str, str]) -> None:
        self._names = (*LABELS, *labels)
        self._values = (*label_values, *labels.values())

    def of(self, s: StateReply | None, step: StepReply | None) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        if step is not None:
            text = "seconds that the scheduler's present step has taken; 0: it rests"
            yield self._gauge(Figure("tandem_step_age_seconds", text), step.busy_s or 0.0)
        if s is None:
            return
        yield from self._load(s)
        for queue, figure in QUEUES.items():
            if queue in s.queues or queue == "waiting":
                yield self._gauge(figure, s.queues.get(queue, 0))
        for name in sorted(s.gauges):
            if (gauge := gauge_of(name)) is not None:
                yield self._gauge(gauge, s.gauges[name])
        for name in LEVELS.keys() & s.counters.keys():
            yield self._gauge(LEVELS[name], s.counters[name])
        for name, figure in COUNTERS.items():
            yield self._counter(figure, s.counters.get(name, 0.0))
        lost = s.counters.get("retractions", 0.0) + s.counters.get("preemptions", 0.0)
        yield self._counter(Figure("vllm:num_preemptions", "times that a running request lost its KV"), lost)

    def _load(self, s: StateReply) -> Iterator[GaugeMetricFamily]:
        total = s.num_pages * s.page_size
        usage = used_tokens(s) / total if total else 0.0
        for name in ("sglang:num_running_reqs", "vllm:num_requests_running"):
            yield self._gauge(Figure(name, "requests in the running batch"), s.running)
        yield self._gauge(Figure("vllm:num_requests_waiting", "requests in any queue before the batch"), num_waiting(s))
        for name in ("sglang:token_usage", "vllm:kv_cache_usage_perc"):
            yield self._gauge(Figure(name, "used share of the KV capacity (1: all)"), usage)
        yield self._gauge(Figure("sglang:num_used_tokens", "KV tokens in use (held or quarantined)"), used_tokens(s))
        yield self._gauge(Figure("sglang:max_total_num_tokens", "KV capacity in tokens"), total)
        yield self._gauge(Figure("sglang:cache_hit_rate", "prompt tokens reused / prompt tokens"), cache_hit_rate(s))
        yield self._cache_config(s)

    def _cache_config(self, s: StateReply) -> GaugeMetricFamily:
        """vLLM's block is our page."""
        labels = (*self._names, "block_size", "num_gpu_blocks")
        family = GaugeMetricFamily("vllm:cache_config_info", "shape of the KV cache; always 1", labels=labels)
        family.add_metric((*self._values, str(s.page_size), str(s.num_pages)), 1)
        return family

    def _gauge(self, figure: Figure, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(figure.name, figure.help, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, figure: Figure, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(figure.name, figure.help, labels=self._names)
        family.add_metric(self._values, value)
        return family


def used_tokens(s: StateReply) -> int:
    return (s.pages.get("held", 0) + s.pages.get("quarantined", 0)) * s.page_size


def cache_hit_rate(s: StateReply) -> float:
    prompt = s.counters.get("prompt_tokens", 0.0)
    return s.gauges.get("cache_hit_rate", s.counters.get("cached_tokens", 0.0) / prompt if prompt else 0.0)
