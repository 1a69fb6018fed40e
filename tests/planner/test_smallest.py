"""The smallest cluster for a rate of the whole: as a user finds it, and the parts of the search."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli import main
from engine.model_files.model_config import DEFAULT_MODEL_PATH
from planner.cluster import ClusterLayout, candidates, parse_layout
from planner.config import PlanConfig
from planner.goodput import Point
from planner.run import SimulationLog
from planner.smallest import VerifiedSearch, better, sizes
from planner.study import study_of
from tests.planner.planned import in_process

# Four requests at once, 20 steps of 20 ms each: 10 requests a second and unified worker at most.
PLAN = ["plan", "--model-path", DEFAULT_MODEL_PATH, "--gpu", "L4", "--step-overhead", "0.02"]
LOAD = ["--max-running-requests", "4", "--input-len", "400", "--output-len", "20", "--disable-progress"]
LIMITS = ["--slo-ttft", "0.2", "--slo-tpot", "0.06"]


def test_the_smallest_cluster_comes_first_and_then_what_more_gives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output, log = tmp_path / "plan.json", tmp_path / "log"
    rate = ["--request-rate", "15", "--num-requests", "40", "--layouts", "3U", "1P1D", "2U", "1U"]
    flags = ["--output", str(output), "--log-file", str(log), "--log-level", "debug"]
    assert main([*PLAN, *LOAD, *LIMITS, *rate, *flags]) == 0
    text, errors = capfd.readouterr()
    found = json.loads(output.read_bytes())["sizes"]
    gpus = [one["gpus"] for one in found]
    assert gpus == sorted(gpus) and gpus[0] == 1
    good = [one for one in found if one["point"]["good_share"] >= 0.9]
    assert found[0] not in good and good[0]["gpus"] == 2  # ten a second are one worker's
    assert f"smallest for 15 requests a second: {good[0]['layout']}, 2 GPUs" in text
    assert f"one size smaller, {found[0]['layout']} keeps the limits for " in text
    rows = [line.split()[1] for line in text.splitlines() if line.startswith("| ")][2:]
    assert rows == [one["layout"] for one in good]  # smaller sizes are no answer
    assert all(one["max_per_s"] >= 15 for one in good) and found[0]["max_per_s"] == 0
    assert errors == "" and "at 15 requests a second: INFO engine.loop.loop: " in log.read_text()


@in_process
def test_no_size_that_is_enough_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    rate = ["--request-rate", "200", "--num-requests", "40", "--layouts", "1U", "2U"]
    assert main([*PLAN, *LOAD, *LIMITS, *rate]) == 1
    text = capsys.readouterr().out
    assert "No cluster of up to 2 GPUs serves 200 requests a second within the limits: the best of 2, 2U, keeps" in text
    assert "Raise --num-workers" in text and "less" in text


def test_sizes_are_gpus_and_come_in_order() -> None:
    names = ["2U-tp2", "1P1D", "3U", "1U-tp2", "2U", "1U"]
    assert [[one.name for one in size] for size in sizes([parse_layout(name) for name in names])] == [
        ["1U"],
        ["1P1D", "1U-tp2", "2U"],
        ["3U"],
        ["2U-tp2"],
    ]


def test_a_study_of_a_rate_has_all_sizes_and_long_runs() -> None:
    config = {"model_path": DEFAULT_MODEL_PATH, "gpu": "L4", "input_len": 400, "request_rate": 40.0}
    study = study_of(PlanConfig(**config, num_workers=3, slo_ttft_s=1.0))  # type: ignore[arg-type]
    assert set(study.layouts) == {layout for size in (1, 2, 3) for layout in candidates(size)}
    assert len(study.requests) == 400 and study.max_verified_per_s == 80  # five limits of TTFT at twice the rate
    assert max(layout.num_gpus for layout in study_of(PlanConfig(**config)).layouts) == 8  # type: ignore[arg-type]


def point(rate: float, good: float, ttft_s: float | None = 1.0, tpot_s: float | None = 0.1) -> Point:
    return Point(
        rate=rate,
        good_share=good,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        ttft_p50_s=None,
        tpot_p50_s=None,
        cached_share=0.0,
        busy={},
        errors={},
    )


def test_the_better_layout_keeps_the_limits_of_more_requests_then_is_faster() -> None:
    one, two = ClusterLayout(unified=2), ClusterLayout(prefill=1, decode=1)
    assert better({one: point(1, 0.9), two: point(1, 0.95, ttft_s=2.0)}) == two
    assert better({one: point(1, 0.9), two: point(1, 0.9, ttft_s=0.5)}) == two
    assert better({one: point(1, 0.9, tpot_s=0.05), two: point(1, 0.9)}) == one
    assert better({one: point(1, 0.0, ttft_s=None, tpot_s=None), two: point(1, 0.0)}) == two


def test_a_search_ends_where_a_run_is_too_short() -> None:
    search = VerifiedSearch(guess=1.0, share=0.9, points=[point(1.0, 1.0)], highest=3.0)
    tried = []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        search.points.append(point(rate, 1.0))
    assert tried == [2.0, 3.0] and search.best is not None and search.best.rate == 3.0


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_simulated_workers_log_to_their_file_alone(
    tmp_path: Path, root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    log = SimulationLog(None, level="info")
    log.begin(ClusterLayout(unified=2), 1.5)
    root_logger.warning("no one reads this")
    path = tmp_path / "log"
    log = SimulationLog(str(path), level="warning")
    log.begin(ClusterLayout(unified=2), 1.5)
    root_logger.info("too low")
    root_logger.warning("high enough")
    assert path.read_text() == "2U at 3 requests a second: WARNING root: high enough\n"
    assert capfd.readouterr() == ("", "")
