"""Processes that compute runs in parallel."""

import multiprocessing
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from types import TracebackType

from planner.config import PlanConfig
from planner.goodput import Point
from planner.layout import ClusterLayout
from planner.study import study_of, try_rate

SPAWN = multiprocessing.get_context("spawn")


class RunPool:
    """Context manager; the processes also end with this one."""

    def __init__(self, config: PlanConfig, *, jobs: int) -> None:
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._children = [self._start(config) for _ in range(jobs)]
        self._threads = ThreadPoolExecutor(jobs)

    def submit(self, layout: ClusterLayout, rate: float) -> "Future[Point]":
        return self._threads.submit(self._run, layout, rate)

    def __enter__(self) -> "RunPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            child.kill()
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.join()

    def _start(self, config: PlanConfig) -> "multiprocessing.process.BaseProcess":
        ours, theirs = SPAWN.Pipe()
        child = SPAWN.Process(target=_compute, args=(config, theirs))
        child.start()
        theirs.close()
        self._idle.put(ours)
        return child

    def _run(self, layout: ClusterLayout, rate: float) -> Point:
        child = self._idle.get()
        try:
            child.send((layout, rate))
            point: Point = child.recv()
        except (EOFError, OSError):
            raise RuntimeError(
                f"the run of {layout.name} at {rate:.3g} failed; see the error of its process above"
            ) from None
        finally:
            self._idle.put(child)
        return point


def _compute(config: PlanConfig, orders: Connection) -> None:
    study = study_of(replace(config, save_profile=None))
    while True:
        try:
            layout, rate = orders.recv()
        except EOFError:
            return
        orders.send(try_rate(study, layout, rate))
