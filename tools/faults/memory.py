"""Resident memory of processes over time, and whether it grows: a straight line through what comes after warm-up."""

import contextlib
from dataclasses import dataclass, field
from statistics import fmean, linear_regression

import psutil

from tools.faults.household import Part

# Of a process's life. Caches and pools fill, and tables with a time to live: the slowest is prefill's memory of ended
# rooms (300 s), which grows until the first of them expire.
WARM_UP_S = 320.0
NUM_KEPT = 60  # samples of a curve that go into the report
LEAST_SPAN_S = 60.0  # shorter lives say nothing


@dataclass
class Curve:
    """One process. `at_s` since the start of the run; `kib` resident."""

    name: str
    at_s: list[float] = field(default_factory=list)
    kib: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Trend:
    """After warm-up: KiB a minute, KiB over the span by the fitted line, and the mean."""

    name: str
    kib_a_minute: float
    growth_kib: float
    mean_mib: float
    span_s: float
    curve_mib: tuple[tuple[int, float], ...] = ()  # (seconds, MiB), the warm-up too


class Watch:
    """Samples every process of the parts; a restarted one is another curve."""

    def __init__(self) -> None:
        self._curves: dict[tuple[int, float], Curve] = {}

    def sample(self, parts: list[Part], now_s: float) -> None:
        for part in parts:
            for process in part.tree():
                with contextlib.suppress(psutil.Error):
                    key = (process.pid, process.create_time())
                    curve = self._curves.get(key) or self._curves.setdefault(key, Curve(_name(part, process)))
                    curve.at_s.append(now_s)
                    curve.kib.append(process.memory_info().rss / 1024)

    def trends(self) -> list[Trend]:
        """Of all that lived long enough."""
        found = [trend(curve) for curve in self._curves.values()]
        return [one for one in found if one is not None]

    @property
    def num_processes(self) -> int:
        return len(self._curves)


def trend(curve: Curve) -> Trend | None:
    """The least-squares line through the samples after warm-up; None for a life that was too short."""
    if not curve.at_s:
        return None
    points = [(x, y) for x, y in zip(curve.at_s, curve.kib, strict=True) if x - curve.at_s[0] >= WARM_UP_S]
    if len(points) < 3 or (span_s := points[-1][0] - points[0][0]) < LEAST_SPAN_S:
        return None
    times, sizes = zip(*points, strict=True)
    slope = linear_regression(times, sizes).slope
    return Trend(curve.name, slope * 60, slope * span_s, fmean(sizes) / 1024, span_s, _thinned(curve))


def _thinned(curve: Curve) -> tuple[tuple[int, float], ...]:
    step = max(1, len(curve.at_s) // NUM_KEPT)
    points = zip(curve.at_s[::step], curve.kib[::step], strict=True)
    return tuple((round(at_s), round(kib / 1024, 1)) for at_s, kib in points)


def _name(part: Part, process: psutil.Process) -> str:
    if process.pid == part.process.pid:
        return f"{part.name} frontend" if part.name.startswith(("prefill", "decode")) else part.name
    words = " ".join(process.cmdline())
    return f"{part.name} {'scheduler' if 'scheduler' in words else '?'}"
