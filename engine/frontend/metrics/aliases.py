"""A metric under a second name. Copies are made when it is scraped, so counting costs nothing more."""

from collections.abc import Iterator, Mapping

from prometheus_client import Histogram
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


def renamed(family: MetricWrapperBase, name: str) -> Collector:
    """`family` again as `name` (a counter without its `_total`)."""
    return _Renamed(family, name)


class _Renamed(Collector):
    def __init__(self, family: MetricWrapperBase, name: str) -> None:
        self._family = family
        self._name = name

    def collect(self) -> Iterator[Metric]:
        for metric in self._family.collect():
            samples = [s._replace(name=self._name + s.name.removeprefix(metric.name)) for s in metric.samples]
            yield _metric(self._name, metric, samples)


class StageAliases(Collector):
    """Of a histogram with a label `stage`, some stages as histograms of their own: `names` by stage."""

    def __init__(self, family: Histogram, names: Mapping[str, str]) -> None:
        self._family = family
        self._names = names

    def collect(self) -> Iterator[Metric]:
        for metric in self._family.collect():
            for stage, name in self._names.items():
                samples = [
                    _without_stage(s)._replace(name=name + s.name.removeprefix(metric.name))
                    for s in metric.samples
                    if s.labels["stage"] == stage
                ]
                yield _metric(name, metric, samples)


def _without_stage(sample: Sample) -> Sample:
    return sample._replace(labels={k: v for k, v in sample.labels.items() if k != "stage"})


def _metric(name: str, like: Metric, samples: list[Sample]) -> Metric:
    metric = Metric(name, like.documentation, like.type)
    metric.samples = samples
    return metric
