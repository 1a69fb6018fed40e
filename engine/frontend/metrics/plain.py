"""Lock-free counter and histogram; prometheus_client's take a lock per token."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


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
