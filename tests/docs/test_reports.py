"""The committed pages of reports are what their writers make of the committed figures."""

import json
from pathlib import Path

from benchmarks import peers, plan_error
from benchmarks.report import KEPT, MEASURES, with_section
from tests.packages import ROOT
from tools import api_table, flags_table
from tools.faults import report as faults
from tools.fuzz.report import PAGE

REPORTS = ROOT / "docs" / "reports"


def test_reliability(tmp_path: Path) -> None:
    faults.write_page(REPORTS, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == faults.PAGE.read_text()


def test_plan_error() -> None:
    report = json.loads((REPORTS / "plan_error.json").read_text())
    assert plan_error.page(report) == (REPORTS / "plan_error.md").read_text()


def test_peers() -> None:
    assert peers.page(peers.kept()) == peers.PAGE.read_text()


def test_routes_and_fields() -> None:
    """After a change of routes or bodies: make api-table."""
    assert api_table.page() == api_table.PAGE.read_text()


def test_flags() -> None:
    """After a change of flags: make flags-table."""
    assert flags_table.page() == flags_table.PAGE.read_text()


def test_fuzz_begins_as_its_writer_says() -> None:
    assert (REPORTS / "fuzz.md").read_text().startswith(PAGE.partition("{")[0])


def test_benchmarks_say_what_was_measured() -> None:
    """Most figures are not kept beside the page, so only its text is compared."""
    page = (KEPT / "benchmarks.md").read_text()
    for name, measure in MEASURES.items():
        assert f"## {measure.title}\n\n{measure.about}\n" in page, name


def test_a_section_is_written_again_alone() -> None:
    """What stands behind its stamp stays, and so do all other sections; a new one comes before the later ones."""
    env = {
        "cpu": "C",
        "cores": 2,
        "memory_gib": 1,
        "gpu": "",
        "commit": "abc",
        "time": "now",
        "versions": {"torch": "2"},
    }
    rows = [{"batch": 8, "step, ms": 12.345, "way": None}]
    result = {"environment": env, "arguments": {"steps": 4}, "tables": {"Above.": rows}}
    tail = "\nBy hand.\n\n## Speculation\n\nx\n\n`python -m benchmarks.speculation` on A.\n"
    old = "# B\n\n## Integer weights\n\nold\n\n`python -m benchmarks.quantized_step` on A.\n" + tail
    new = with_section(old, "quantized_step", result)
    stamp = '`make bench ARGS="--only quantized_step --set steps=4"` on C, 2 cores, 1 GiB; commit abc, now; torch 2.\n'
    assert new.endswith(stamp + tail) and "old" not in new and new.startswith("# B\n\n## Integer weights")
    assert (
        "Above.\n\n| batch | step, ms | way |\n| ----- | -------: | --: |\n| 8     |     12.3 |     |\n\n`make" in new
    )
    assert with_section(new, "quantized_step", result) == new
    before, _ = new.split("\n## Speculation")
    assert with_section(before + "\n## Start\n", "scheduler_step", result).startswith(before + "\n## Scheduler alone\n")
    assert with_section(new, "scheduler_step", result).startswith(new + "\n## Scheduler alone\n")
