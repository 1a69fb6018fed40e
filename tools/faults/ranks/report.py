"""One JSON file for all that is run with ranks: pairs of shapes, cells of faults, the soak; each part with where it was run."""

import json
from pathlib import Path
from typing import Any

from tools.faults.report import REPORTS, about_run

REPORT = REPORTS / "rank_faults.json"


def begun(path: Path, part: str) -> dict[str, Any]:
    """The report as it is, for results of `part` to be added."""
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    report.setdefault("about", {})[part] = about_run()
    report.setdefault(part, {})
    return report


def keep(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
