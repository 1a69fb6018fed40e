"""Prometheus metrics of one worker under SGLang's names, so that existing dashboards work.

Owns what is counted where a client sees it (latencies, tokens, requests). Load and transfer figures are the
scheduler's: they come in as a `StateReply` when somebody scrapes.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from engine.messages import StateReply, TextOutput

LABELS = ("model_name", "engine_type")
TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
ITL_S = (
    0.001,
    0.002,
    0.004,
    0.006,
    0.008,
    0.010,
    0.015,
    0.020,
    0.025,
    0.030,
    0.040,
    0.060,
    0.080,
    0.1,
    0.2,
    0.4,
    0.8,
    1,
    2,
    4,
    8,
)
E2E_S = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200)

QUEUE_GAUGES = {
    "waiting": ("num_queue_reqs", "requests in the waiting queue"),
    "grammar": ("num_grammar_queue_reqs", "requests whose grammar is being compiled"),
    "bootstrap": ("num_prefill_bootstrap_queue_reqs", "requests in the prefill bootstrap queue"),
    "inflight": ("num_prefill_inflight_queue_reqs", "requests in the prefill inflight queue"),
    "prealloc": ("num_decode_prealloc_queue_reqs", "requests in the decode prealloc queue"),
    "transfer": ("num_decode_transfer_queue_reqs", "requests in the decode transfer queue"),
    "retracted": ("num_retracted_reqs", "retracted requests that wait"),
}
SCHEDULER_COUNTERS = {
    "transfer_failed": ("num_transfer_failed_reqs", "requests whose KV transfer failed"),
    "retried": ("num_transfer_retries", "KV transfers that began anew because a write had failed"),
    "kv_checksum_failed": ("num_kv_checksum_failed_reqs", "requests whose KV arrived corrupted"),
    "retractions": ("num_retractions", "times that a request lost its memory"),
    "preemptions": ("num_preemptions", "times that a request lost its place to one of higher priority"),
    "steps": ("num_steps", "steps that were planned"),
    "prefill_steps": ("num_prefill_steps", "steps that computed a part of a prompt"),
    "mixed_steps": ("num_mixed_steps", "prefill steps in which decodes rode along"),
    "wasted_draws": ("num_wasted_draws", "tokens drawn after their request had ended, and dropped"),
    "late_draws": ("num_late_draws", "steps whose draw waited for grammar masks while their forward ran"),
    "backup_saved_tokens": ("retraction_saved_tokens", "retracted tokens whose KV was copied to the host"),
    "backup_restored_tokens": ("retraction_restored_tokens", "retracted tokens whose KV came back from the host"),
    "resumed_computed": ("num_resumed_computed", "retracted requests whose KV this worker computed again"),
    "resumed_restored": ("num_resumed_restored", "retracted requests whose KV came back from the host"),
    "resumed_through_prefill": ("num_resumed_through_prefill", "retracted requests whose KV a prefill worker computed"),
    "recompute_failed": ("num_recompute_failed", "times that prefill was asked for it and did not deliver"),
    "recompute_refused": ("num_recompute_refused", "times that a decode worker asked for KV and was refused"),
    "recomputed": ("num_recomputed", "retracted requests of decode workers whose KV was computed here"),
    "recomputed_tokens": ("recomputed_tokens", "tokens that were computed for them, cached ones not counted"),
    "bootstrap_failed": ("num_bootstrap_failed_reqs", "requests whose bootstrap failed"),
    "hicache_device_hit_tokens": ("hicache_device_hit_tokens", "prompt tokens found on the device"),
    "hicache_host_hit_tokens": ("hicache_host_hit_tokens", "prompt tokens that came back from host memory"),
    "hicache_disk_hit_tokens": ("hicache_disk_hit_tokens", "prompt tokens that came back from files"),
    "hicache_saved_pages": ("hicache_saved_pages", "pages copied to host memory"),
    "hicache_loaded_pages": ("hicache_loaded_pages", "pages copied back from host memory"),
    "hicache_written_pages": ("hicache_written_pages", "pages written to files"),
    "hicache_read_pages": ("hicache_read_pages", "pages read from files"),
    "hicache_skipped_pages": ("hicache_skipped_pages", "pages not copied: all of host memory was in use"),
    "hicache_unwritten_pages": ("hicache_unwritten_pages", "pages not written: no room, or the disk is too slow"),
    "hicache_failed_writes": ("hicache_failed_writes", "files that could not be written"),
    "hicache_bad_files": ("hicache_bad_files", "files that were wrong and were deleted"),
    "grammar_compiled": ("num_grammar_compiled", "grammars that were compiled"),
    "grammar_cache_hits": ("num_grammar_cache_hit", "requests whose grammar was compiled before"),
    "grammar_failed": ("num_grammar_failed", "requests whose grammar did not compile"),
    "grammar_timeouts": ("num_grammar_timeout", "requests whose grammar did not compile in time"),
}


STAGES = ("bootstrap_time", "queue_time", "prefill_time", "transfer_time", "decode_time")


class Metrics:
    """Implements `client.Observer`."""

    def __init__(self, *, model_name: str, mode: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._label_values = (model_name, "unified" if mode == "null" else mode)
        self._scheduler = _SchedulerCollector(self._label_values)
        self.registry.register(self._scheduler)
        self._prompt_tokens = self._counter("prompt_tokens", "prompt tokens of accepted requests")
        self._generation_tokens = self._counter("generation_tokens", "generated tokens")
        self._cached_tokens = self._counter("cached_tokens", "prompt tokens whose KV was reused")
        self._requests = self._counter("num_requests", "accepted requests")
        self._aborted = self._counter("num_aborted_requests", "requests that were aborted or failed")
        self._rejected = self._counter("num_early_rejections", "requests refused because they would have come too late")
        self._ttft = self._histogram("time_to_first_token_seconds", "time to the first token", TTFT_S)
        self._itl = self._histogram("inter_token_latency_seconds", "time between tokens", ITL_S)
        self._queue = self._histogram("queue_time_seconds", "time between arrival and first step", E2E_S)
        self._stages = Histogram(
            "sglang:per_stage_req_latency_seconds",
            "time in each stage",
            (*LABELS, "stage"),
            registry=self.registry,
            buckets=E2E_S,
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "time from request to last token", E2E_S)

    def on_start(self, num_prompt_tokens: int) -> None:
        self._requests.inc()
        self._prompt_tokens.inc(num_prompt_tokens)

    def on_reject(self) -> None:
        self._rejected.inc()

    def on_tokens(self, *, num_tokens: int, gap_s: float, first: bool) -> None:
        self._generation_tokens.inc(num_tokens)
        if first:
            self._ttft.observe(gap_s)
        else:
            for _ in range(num_tokens):
                self._itl.observe(gap_s / num_tokens)

    def on_end(self, output: TextOutput | None, *, elapsed_s: float) -> None:
        """`output`: the one with the finish, None when the client went away."""
        if output is None or output.tokens.finish is None or output.tokens.finish.kind == "abort":
            self._aborted.inc()
            return
        self._cached_tokens.inc(output.tokens.cached_tokens)
        self._observe_stages(output.tokens.times)
        self._e2e.observe(elapsed_s)

    def _observe_stages(self, times: dict[str, float]) -> None:
        """The request's time line, as the scheduler saw it."""
        for stage in STAGES:
            if stage in times:
                self._stages.labels(*self._label_values, stage.removesuffix("_time")).observe(times[stage])
        if "queue_time" in times:
            self._queue.observe(times["queue_time"])

    def exposition(self, state: StateReply | None) -> bytes:
        """The text format; `state` None: without the scheduler's own figures."""
        self._scheduler.state = state
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"sglang:{name}", help, LABELS, registry=self.registry).labels(*self._label_values)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"sglang:{name}", help, LABELS, registry=self.registry, buckets=buckets)
        return family.labels(*self._label_values)


class _SchedulerCollector(Collector):
    def __init__(self, label_values: tuple[str, str]) -> None:
        self.state: StateReply | None = None
        self._label_values = label_values

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        s = self.state
        if s is None:
            return
        total = s.num_pages * s.page_size
        yield self._gauge("num_running_reqs", "requests in the running batch", s.running)
        yield self._gauge("num_used_tokens", "KV tokens in use (held or quarantined)", used_tokens(s))
        yield self._gauge("max_total_num_tokens", "KV capacity in tokens", total)
        yield self._gauge("token_usage", "used share of the KV capacity", used_tokens(s) / total if total else 0.0)
        yield self._gauge("cache_hit_rate", "prompt tokens reused / prompt tokens", cache_hit_rate(s))
        yield self._gauge("gen_throughput", "generated tokens per second", s.gauges.get("gen_throughput", 0.0))
        for queue, (name, help) in QUEUE_GAUGES.items():
            if queue in s.queues or queue == "waiting":
                yield self._gauge(name, help, s.queues.get(queue, 0))
        for counter, (name, help) in SCHEDULER_COUNTERS.items():
            yield self._counter(name, help, s.counters.get(counter, 0.0))
        yield from self._others(s)

    def _others(self, s: StateReply) -> Iterator[GaugeMetricFamily]:
        """Gauges that the role adds (kv_transfer_speed_gb_s ...), by the names it gives."""
        for name in sorted(s.gauges):
            if name.isidentifier() and name.isascii() and name not in ("gen_throughput", "cache_hit_rate"):
                yield self._gauge(name, "reported by the scheduler", s.gauges[name])

    def _gauge(self, name: str, help: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"sglang:{name}", help, labels=LABELS)
        family.add_metric(self._label_values, value)
        return family

    def _counter(self, name: str, help: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"sglang:{name}", help, labels=LABELS)
        family.add_metric(self._label_values, value)
        return family


def used_tokens(s: StateReply) -> int:
    return (s.pages.get("held", 0) + s.pages.get("quarantined", 0)) * s.page_size


def cache_hit_rate(s: StateReply) -> float:
    prompt = s.counters.get("prompt_tokens", 0.0)
    return s.gauges.get("cache_hit_rate", s.counters.get("cached_tokens", 0.0) / prompt if prompt else 0.0)
