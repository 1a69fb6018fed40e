"""The six loads in the virtual world: goodput of each choice, and TTFT of later turns. Two GPUs prefill, two decode; or four do both."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.where.loads import Load, requests_of
from planner.cluster import ClusterLayout, parse_layout
from planner.config import PlanConfig
from planner.executor import TOKEN
from planner.goodput import Search, judged, point_of
from planner.study import Study, planned_cluster, run_study, study_of
from router.attempts.request import Slo

MODEL = Path(__file__).resolve().parents[2] / "docs" / "planning"
PAIRS, UNIFIED, AUTO = "2P2D", "4U-mixed", "auto"
CHOICES = {  # layout, route, and whether prefixes are fetched
    "pair": (PAIRS, "pair", True),
    "decode": (PAIRS, "decode", False),
    "prefill": (PAIRS, "prefill", False),
    "unified": (UNIFIED, "pair", False),
    AUTO: (PAIRS, "auto", True),
}
NEAR, STRIDE = 1.04, 1.3  # a search resolves differences of 3 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A choice under a load. `traces`: folder of Mooncake's traces."""

    load: Load
    choice: str
    traces: str
    gpu: str

    def study(self) -> tuple[Study, ClusterLayout]:
        """Without requests."""
        layout, route, fetch = CHOICES[self.choice]
        config = PlanConfig(
            model_path=str(MODEL),
            gpu=self.gpu,
            layouts=(layout,),
            policy="cache_aware",
            route=route,
            prefix_fetch=fetch,
        )
        found = study_of(config)
        slo = self.load.slo
        costs = replace(found.costs, wanted=Slo(slo.ttft_s, slo.tpot_s))
        return replace(found, slo=slo, costs=costs), parse_layout(layout)

    def at(self, study: Study, rate: float) -> Study:
        history, requests = requests_of(self.load, rate=rate, traces=self.traces)
        return replace(study, history=history, requests=requests)


def measure(cells: Sequence[Cell], *, jobs: int) -> Iterator[dict[str, Any]]:
    """Search each cell in one of `jobs` processes; the first that ends comes first."""
    with get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(search, cells)


def search(cell: Cell) -> dict[str, Any]:
    """Search the highest rate, in requests a second of the whole, at which enough requests are good."""
    gc.disable()  # a search is short, and what it makes is freed by counts of references
    study, layout = cell.study()
    found, turns = Search(guess=cell.load.guess, share=study.slo.share, near=NEAR, stride=STRIDE), list[float | None]()
    while (rate := found.next_rate()) is not None:
        now = cell.at(study, rate)
        records = run_study(now, planned_cluster(now, layout), rate)
        found.points.append(point_of(records, rate=rate, slo=study.slo, busy={}))
        later = [
            r.ttft_s for r in judged(records) if r.ttft_s is not None and TOKEN in dict(now.requests[r.idx].blocks)
        ]
        turns.append(median(later) if later else None)
    points = [asdict(one) | {"later_ttft_s": ttft_s} for one, ttft_s in zip(found.points, turns, strict=True)]
    return {"load": cell.load.name, "choice": cell.choice, "rate": crossing(found), "points": points}


def crossing(found: Search) -> float:
    """The rate between the last good and the first bad point at which the share of good requests is as wanted, by a straight line."""
    good = found.best
    bad = min((one for one in found.points if one.good_share < found.share), key=lambda one: one.rate, default=None)
    if good is None or bad is None:
        return 0.0 if good is None else good.rate
    return good.rate + (bad.rate - good.rate) * (good.good_share - found.share) / (good.good_share - bad.good_share)
