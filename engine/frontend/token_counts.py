"""Metrics that every token moves, counted at the least cost: prometheus_client's own take locks and look at every bucket.

Owns the counts; families are made when somebody scrapes. One thread counts and collects.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString

Labels = tuple[Sequence[str], Sequence[str]]  # names, values


class TokenCounter(Collector):
    """`num_tokens`: so far; whoever sees one adds it."""

    def __init__(self, name: str, help: str, labels: Labels) -> None:
        self.num_tokens = 0
        self._name, self._help = name, help
        self._label_names, self._label_values = labels

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._help, labels=self._label_names)
        family.add_metric(self._label_values, self.num_tokens)
        yield family


class GapHistogram(Collector):
    """Seconds between tokens. `bounds`: upper ones of the buckets, in order, without the infinite one."""

    def __init__(self, name: str, help: str, labels: Labels, *, bounds: Sequence[float]) -> None:
        self._name, self._help = name, help
        self._label_names, self._label_values = labels
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum_s = 0.0

    def count(self, gap_s: float, num_tokens: int) -> None:
        """So many tokens came at once, this long after the last one: each took its share."""
        self._counts[bisect_left(self._bounds, gap_s / num_tokens)] += num_tokens
        self._sum_s += gap_s

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._label_names)
        names = map(floatToGoString, (*self._bounds, INF))
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(self._label_values, buckets=buckets, sum_value=self._sum_s)
        yield family
