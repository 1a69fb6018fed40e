"""Runs a plan's layouts and rates in parallel."""

import multiprocessing
import queue
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import TracebackType

from tqdm import tqdm  # type: ignore[import-untyped]

from planner.cluster import ClusterLayout
from planner.config import PlanConfig
from planner.goodput import Grid, Point, Search
from planner.study import Study, guess_rate, study_of, try_rate

# ---- Processes that compute runs in parallel.

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


# ---- run


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A layout's runs, and the best, if any."""

    layout: ClusterLayout
    points: list[Point]
    best: Point | None

    @property
    def rate(self) -> float:
        return self.best.rate if self.best else 0.0


def run_plan(study: Study) -> list[Outcome]:
    config = study.config
    searches = {layout: _search(study, layout) for layout in study.layouts}
    with (
        RunPool(config, jobs=min(config.jobs, len(searches))) as pool,
        tqdm(unit="run", disable=config.disable_progress or None) as bar,
    ):
        running: dict[Future[Point], ClusterLayout] = {}

        def submit_next(layout: ClusterLayout) -> None:
            rate = searches[layout].next_rate()
            if rate is not None:
                running[pool.submit(layout, rate)] = layout

        for layout in searches:
            submit_next(layout)
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                layout = running.pop(future)
                searches[layout].add(future.result())
                bar.set_postfix_str(_news(searches), refresh=False)
                bar.update()
                submit_next(layout)
    return [Outcome(layout, sorted(s.points, key=lambda p: p.rate), s.best) for layout, s in searches.items()]


def _search(study: Study, layout: ClusterLayout) -> Search | Grid:
    if study.config.rates:
        return Grid(rates=sorted(study.config.rates), share=study.slo.share)
    return Search(guess=guess_rate(study, layout), share=study.slo.share)


def _news(searches: Mapping[ClusterLayout, Search | Grid]) -> str:
    best = {layout.name: search.best.rate for layout, search in searches.items() if search.best}
    name = max(best, key=best.__getitem__, default=None)
    return "" if name is None else f"best so far {name}: {best[name]:.3g} req/s a GPU"
