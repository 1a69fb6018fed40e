"""What finds a planted bug: tests, the stories of tests/core/proof, or the fixed runs of simulated clusters.

It imports the product: import it once the bug is planted.
"""

from collections.abc import Sequence

import pytest

from tools.mutants.planting import ROOT, finders_of
from tools.simulation.__main__ import encoder_outcomes, first_failure, fixed_outcomes
from tools.simulation.promises import TOO_LITTLE
from tools.soak_core import drive_round

SEEDS, STEPS = (1, 2, 3), 60_000  # of the core's stories


def look(table: str) -> str:
    """What the proof of `table` finds in this process; "": nothing."""
    if paths := finders_of(table):
        return _look_by_tests(paths)
    if table == "core":
        return _look_by_stories()
    outcomes = encoder_outcomes() if table == "encoders" else fixed_outcomes()
    return first_failure(outcome for outcome in outcomes if TOO_LITTLE not in outcome.problem)


def _look_by_tests(paths: Sequence[str]) -> str:
    failed = _FirstFailure()
    options = ("-q", "-x", "-p", "no:cacheprovider", "--assert=plain", "-m", "")  # slow ones, too
    status = pytest.main([*options, *(str(ROOT / path) for path in paths)], plugins=[failed])
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"pytest ends with {status!r}"
    return failed.error


class _FirstFailure:
    """A plugin of pytest that keeps where a test failed, and by which error."""

    error = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.error:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.error = f"{report.nodeid}: {report.longrepr if crash is None else crash.message}"


def _look_by_stories() -> str:
    for seed in SEEDS:
        number, steps = seed, 0
        while steps < STEPS:
            try:
                steps += drive_round(number, shrink=False)["steps"]
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            number += 1
    return ""
