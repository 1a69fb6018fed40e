"""Runs a plan: every layout's rates, a few processes at a time, with a progress bar. It owns the pool and the bar."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass

from tqdm import tqdm  # type: ignore[import-untyped]

from deploy.plan.goodput import Grid, Point, Search
from deploy.plan.layout import Layout
from deploy.plan.study import Study, guess_rate, try_rate

@dataclass(frozen=True, slots=True)
class Outcome:
    """All that was learnt of one layout. `best`: None when no rate was good enough."""

    layout: Layout
    points: list[Point]
    best: Point | None

    @property
    def goodput(self) -> float:
        return self.best.rate if self.best else 0.0


def run_plan(
    study: Study, layouts: Sequence[Layout], *, rates: Sequence[float], jobs: int, progress: bool
) -> list[Outcome]:
    """The outcome of each layout, in the order given. `rates`: try these; none: search."""
    share = study.slo.share
    searches: dict[Layout, Search | Grid] = {
        layout: Grid(rates=sorted(rates), share=share)
        if rates
        else Search(guess=guess_rate(study, layout), share=share)
        for layout in layouts
    }
    context = multiprocessing.get_context("spawn")
    with (
        tqdm(unit="run", disable=None if progress else True) as bar,
        ProcessPoolExecutor(min(jobs, len(layouts)), mp_context=context) as pool,
    ):
        running: dict[Future[Point], Layout] = {}

        def ask(layout: Layout) -> None:
            rate = searches[layout].next_rate()
            if rate is not None:
                running[pool.submit(try_rate, study, layout, rate)] = layout

        for layout in layouts:
            ask(layout)
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                layout = running.pop(future)
                searches[layout].told(future.result())
                bar.update()
                bar.set_postfix_str(_news(searches), refresh=False)
                ask(layout)
    return [Outcome(layout, sorted(s.points, key=lambda p: p.rate), s.best) for layout, s in searches.items()]


def _news(searches: "dict[Layout, Search | Grid]") -> str:
    best = {layout.name: search.best.rate for layout, search in searches.items() if search.best}
    name = max(best, key=best.__getitem__, default=None)
    return "" if name is None else f"best so far {name}: {best[name]:.3g} req/s a GPU"
