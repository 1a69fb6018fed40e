"""What the benchmark of routes decides beside its clusters: loads, where a search ends, and its page."""

import json
from pathlib import Path

import pytest

from benchmarks.where import page
from benchmarks.where.loads import LOADS, SHORT, Load, Trace, requests_of, shrunk
from benchmarks.where.planned import CHOICES, Cell, crossing, search
from benchmarks.where.served import CHOICES as SERVED
from benchmarks.where.served import WITHOUT_FETCH, Alone
from planner.executor import TOKEN
from planner.goodput import Point, Search
from planner.workload import PlannedRequest, tokens_of

MADE = [one for one in (*LOADS, *SHORT) if not isinstance(one.kind, Trace)]


def point(rate: float, share: float) -> Point:
    return Point(
        rate=rate, good_share=share, ttft_s=0.2, tpot_s=0.02, ttft_p50_s=0.1, tpot_p50_s=0.01, cached_share=0.0,
        busy={}, errors={},
    )  # fmt: skip


@pytest.mark.parametrize("load", MADE, ids=lambda one: one.name)
def test_a_load_comes_at_its_rate_and_later_turns_hold_the_answers(load: Load) -> None:
    history, run = requests_of(load, rate=5.0, traces="", count=60)
    assert len(run) == 60 and run[0].at == 0.0 and run[-1].at == pytest.approx(59)
    assert (history, run) == requests_of(load, rate=5.0, traces="", count=60)
    for one in run:
        if one.after is not None:
            before = tokens_of(run[one.after].answered)
            assert one.tokens()[: len(before)] == before and len(before) < one.input_len


def test_a_shrunk_trace_keeps_answers_where_they_were() -> None:
    first = PlannedRequest(at=0, blocks=((7, 1000),), output_len=200)
    later = PlannedRequest(at=1, blocks=(*first.answered, (8, 300)), output_len=40, after=0)
    by = Trace(file="", prompts=0.1, answers=0.2)
    assert shrunk(later, by).blocks[:2] == shrunk(first, by).answered == ((7, 100), (TOKEN, 40))


def test_goodput_lies_where_the_share_crosses_the_objective() -> None:
    found = Search(guess=4.0, share=0.9, points=[point(4.0, 1.0), point(5.0, 0.8), point(8.0, 0.95)])
    assert crossing(found) == pytest.approx(4.5)
    assert crossing(Search(guess=4.0, share=0.9, points=[point(4.0, 0.5)])) == 0.0


def test_a_search_and_its_page(tmp_path: Path) -> None:
    """The smallest of both measurements: the second one without processes."""
    load = Load(name="bursts", kind=LOADS[1].kind, ttft_s=2.0, tpot_s=0.03, guess=20.0, requests=10)
    cells = {
        name: search(Cell(load=load, choice=name, traces="", gpu="H200")) | {"environment": ENVIRONMENT}
        for name in ("pair", "auto")
    }
    assert all(cell["rate"] > 0 for cell in cells.values()) and set(cells) < set(CHOICES)
    points = {name: json.loads(json.dumps(cells["pair"]["points"][0])) for name in SERVED}
    served = {
        "turns": {n: {"ttft_s": [0.3, 0.1, 0.1], "again": 15.0, "commit": "0"} for n in (*SERVED, WITHOUT_FETCH)},
        "loads": {"chat": {"rate": 2.0, "ttft_s": 1.0, "tpot_s": 0.05, "points": points, "commit": "0"}},
        "cores_left": 1.9,
        "layers": 2,
        "environment": ENVIRONMENT,
    }
    guess = next(one for one in LOADS if one.name == "bursts").guess
    for cell in cells.values():
        cell["points"][0]["rate"] = guess
    page.write(tmp_path / "where.json", {"planned": {"bursts": cells}, "served": served})
    text = (tmp_path / "where.md").read_text()
    assert "| bursts |" in text and "auto / best fixed" in text and "pair, no fetch" in text and "abc123" in text


ENVIRONMENT = {"commit": "abc123", "command": "where", "time": "now", "cpu": "some", "cores": 2}


def test_rate_and_objectives_follow_what_one_request_takes_alone() -> None:
    some = [PlannedRequest(at=i, blocks=((2, 100),), output_len=20) for i in range(10)]
    slow, fast = Alone(token_s=2e-3, step_s=0.04), Alone(token_s=1e-3, step_s=0.02)
    assert fast.rate(some) == pytest.approx(2 * slow.rate(some))
    assert slow.objectives(some).ttft_s == pytest.approx(2 * fast.objectives(some).ttft_s)
