"""Runs a plan's layouts and rates in parallel."""

import logging
import multiprocessing
import queue
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from tqdm import tqdm  # type: ignore[import-untyped]

from planner.cluster import ClusterLayout
from planner.config import PlanConfig
from planner.goodput import Grid, Point, Search
from planner.study import Study, guess_rate, study_of, try_rate

# ---- Processes that compute runs in parallel.

SPAWN = multiprocessing.get_context("spawn")


class RunPool:
    """Processes, and a progress bar that counts their runs; they end with this one."""

    def __init__(self, config: PlanConfig, *, jobs: int) -> None:
        jobs = min(config.jobs, jobs)
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._children = [self._start(config) for _ in range(jobs)]
        self._threads = ThreadPoolExecutor(jobs)
        self.bar = tqdm(unit="run", disable=config.disable_progress or None)

    def submit(self, layout: ClusterLayout, rate: float) -> "Future[Point]":
        return self._threads.submit(self._run, layout, rate)

    def __enter__(self) -> "RunPool":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
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
    log = SimulationLog(config.log_file, level=config.lowest_logged)
    study = study_of(replace(config, save_profile=None))
    while True:
        try:
            layout, rate = orders.recv()
        except EOFError:
            return
        log.begin(layout, rate)
        orders.send(try_rate(study, layout, rate))


class SimulationLog:
    """Lines of a file with the run's name, or nothing."""

    def __init__(self, path: str | None, *, level: str) -> None:
        self._handler: logging.Handler = logging.NullHandler() if path is None else logging.FileHandler(path, mode="a")
        logging.basicConfig(level=level.upper(), handlers=[self._handler], force=True)

    def begin(self, layout: ClusterLayout, rate: float) -> None:
        """`rate`: per second and GPU."""
        run = f"{layout.name} at {rate * layout.num_gpus:.3g} requests a second"
        self._handler.setFormatter(logging.Formatter(f"{run}: %(levelname)s %(name)s: %(message)s"))


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
    searches = {layout: _search(study, layout) for layout in study.layouts}
    with RunPool(study.config, jobs=len(searches)) as pool:
        search_all(pool, searches)
    return [outcome_of(layout, search) for layout, search in searches.items()]


def search_all(pool: RunPool, searches: Mapping[ClusterLayout, Search | Grid]) -> None:
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
            searches[layout].points.append(future.result())
            pool.bar.set_postfix_str(_best_so_far(searches), refresh=False)
            pool.bar.update()
            submit_next(layout)


def outcome_of(layout: ClusterLayout, search: Search | Grid) -> Outcome:
    return Outcome(layout, sorted(search.points, key=lambda p: p.rate), search.best)


def _search(study: Study, layout: ClusterLayout) -> Search | Grid:
    if study.config.rates:
        return Grid(rates=sorted(study.config.rates), share=study.slo.share)
    return Search(guess=guess_rate(study, layout), share=study.slo.share)


def _best_so_far(searches: Mapping[ClusterLayout, Search | Grid]) -> str:
    best = {layout.name: search.best.rate for layout, search in searches.items() if search.best}
    name = max(best, key=best.__getitem__, default=None)
    return "" if name is None else f"best so far {name}: {best[name]:.3g} req/s a GPU"
