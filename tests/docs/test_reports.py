"""The committed pages of reports are what their writers make of the committed figures."""

import json
from pathlib import Path

from benchmarks import auto_roles, peers, plan_error, ranks
from benchmarks.report import ELSEWHERE, KEPT, SECTIONS, with_section
from tests.packages import ROOT
from tools.api_table import page as api_table
from tools.faults import report as faults
from tools.fuzz.report import HEAD

REPORTS = ROOT / "docs" / "reports"


def test_reliability(tmp_path: Path) -> None:
    faults.write_page(REPORTS, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == faults.PAGE.read_text()


def test_auto_roles() -> None:
    report = json.loads((REPORTS / "auto_roles.json").read_text())
    assert auto_roles.page(report, "auto_roles") == (REPORTS / "auto_roles.md").read_text()


def test_plan_error() -> None:
    report = json.loads((REPORTS / "plan_error.json").read_text())
    assert plan_error.page(report) == (REPORTS / "plan_error.md").read_text()


def test_peers() -> None:
    assert peers.page(peers.kept()) == peers.PAGE.read_text()


def test_ranks() -> None:
    report = json.loads((REPORTS / "ranks.json").read_text())
    assert ranks.page(report) == (REPORTS / "ranks.md").read_text()


def test_routes_and_fields() -> None:
    """After a change of routes or bodies: make api-table."""
    assert api_table.page() == api_table.PAGE.read_text()


def test_fuzz_begins_as_its_writer_says() -> None:
    assert (REPORTS / "fuzz.md").read_text().startswith(HEAD)


def test_benchmarks_say_what_was_measured() -> None:
    """Most figures are not kept beside the page, so only its text is compared."""
    page = (KEPT / "benchmarks.md").read_text()
    for name, (title, text, _) in SECTIONS.items():
        assert name in ELSEWHERE or f"## {title}\n\n{text}\n" in page, name


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
    result = {"environment": env, "rows": []}
    tail = "\nBy hand.\n\n## Integer weights\n\nx\n\n`python -m benchmarks.quantized_step` on A.\n"
    old = "# B\n\n## A mixture of experts\n\nold\n\n`python -m benchmarks.moe_step` on A.\n" + tail
    new = with_section(old, "moe_step", result)
    assert (
        new.endswith("commit abc, now; torch 2.\n" + tail)
        and "old" not in new
        and new.startswith("# B\n\n## A mixture")
    )
    before, after = new.split("\n## Integer weights")
    assert with_section(before + "\n## Between two steps\n", "kv_dtype", result).startswith(
        before + "\n## KV of 8 bits: attention\n"
    )
    assert with_section(new, "kv_dtype", result).endswith("commit abc, now; torch 2.\n") and after
