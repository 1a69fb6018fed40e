"""Runs a plan's layouts and rates in parallel."""

from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from tqdm import tqdm  # type: ignore[import-untyped]

from planner.goodput import Grid, Point, Search
from planner.layout import ClusterLayout
from planner.pool import RunPool
from planner.study import Study, guess_rate


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
