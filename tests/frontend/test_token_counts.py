"""What every token is counted by reads like prometheus_client's own."""

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse
from prometheus_client.registry import Collector

from engine.frontend.metrics import ITL_S, Metrics
from engine.frontend.token_counts import GapHistogram

LABELS = (("model_name",), ("m",))
GAPS = ((0.0005, 1), (0.001, 1), (0.0011, 1), (0.016, 4), (100.0, 1))


def text_of(collector: Collector) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def test_gaps_are_those_of_the_library_s_histogram() -> None:
    ours = GapHistogram("gaps", "help", LABELS, bounds=ITL_S)
    family = Histogram("gaps", "help", LABELS[0], registry=None, buckets=ITL_S)
    theirs = family.labels(*LABELS[1])
    for gap_s, num_tokens in GAPS:
        ours.count(gap_s, num_tokens)
        for _ in range(num_tokens):
            theirs.observe(gap_s / num_tokens)
    assert text_of(ours) == text_of(family).split("# HELP gaps_created")[0]


@pytest.mark.parametrize("prefix", ["sglang", "vllm"])
def test_tokens_are_counted_under_both_names(prefix: str) -> None:
    metrics = Metrics(model_name="m", mode="null")
    metrics.on_tokens(num_tokens=1, gap_s=0.1, first=True)
    metrics.on_tokens(num_tokens=3, gap_s=0.03, first=False)
    samples = {s.name: s.value for family in parse(metrics.exposition(None).decode()) for s in family.samples}
    assert samples[f"{prefix}:generation_tokens_total"] == 4
    assert samples[f"{prefix}:inter_token_latency_seconds_count"] == 3
    assert samples[f"{prefix}:inter_token_latency_seconds_sum"] == pytest.approx(0.03)
