"""Plans whose runs need no processes of their own."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import pytest

from planner.cluster import ClusterLayout
from planner.config import PlanConfig
from planner.goodput import Point
from planner.study import study_of, try_rate


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute runs here: a process of `tandem plan` imports for half a second."""
    monkeypatch.setattr("planner.run.RunPool", pool)


@contextmanager
def pool(config: PlanConfig, *, jobs: int) -> Iterator["Here"]:
    yield Here(config)


class Here:
    """In the place of `RunPool`."""

    def __init__(self, config: PlanConfig) -> None:
        self._study = study_of(replace(config, save_profile=None))

    def submit(self, layout: ClusterLayout, rate: float) -> "Future[Point]":
        done: Future[Point] = Future()
        done.set_result(try_rate(self._study, layout, rate))
        return done
