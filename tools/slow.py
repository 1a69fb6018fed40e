"""`make slow-tests`: the tests marked `slow`, which `make test` leaves out; writes docs/reports/slow_tests.json.

A failure leaves no report.
"""

import json
import shlex
import sys
from pathlib import Path

import pytest

from deploy.bench.environment import describe

REPORT = Path(__file__).parents[1] / "docs/reports/slow_tests.json"


class Durations:
    """Seconds of each test that passed, by its name; a plugin of pytest."""

    def __init__(self) -> None:
        self.passed_s: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed_s[report.nodeid] = round(report.duration, 1)


def main() -> int:
    args = sys.argv[1:]
    about = {**describe(), "command": f'make slow-tests ARGS="{shlex.join(args)}"'}
    durations = Durations()
    status = pytest.main(["-m", "slow", "-q", *args], plugins=[durations])
    if status == pytest.ExitCode.OK:
        REPORT.write_text(json.dumps({"about": about, "passed_s": durations.passed_s}, indent=1) + "\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
