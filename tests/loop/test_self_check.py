"""Every owner is asked, whatever the others say; nothing that a check does ends the loop."""

from engine.loop.reporter import problems_of
from tests.core.engine_in_a_test import EngineInATest


def healthy() -> None:
    return None


def asserts() -> None:
    raise AssertionError("two owners of page 3")


def breaks() -> None:
    raise KeyError("r7")


def test_each_failure_is_reported_under_its_owner() -> None:
    found = problems_of({"healthy": healthy, "pages": asserts, "stages": breaks, "table": asserts})
    assert found == [
        "pages: two owners of page 3",
        "stages: its check failed: KeyError: 'r7'",
        "table: two owners of page 3",
    ]


def test_a_broken_scheduler_hides_no_other_finding() -> None:
    """A page that is lost and a row that is used twice, in one scheduler."""
    engine = EngineInATest()
    engine.add("r", [1, 2, 3], max_new_tokens=9)
    engine.turn()
    scheduler = engine.scheduler
    assert problems_of(scheduler.checks()) == []
    scheduler.memory.allocator.allocate(1)
    scheduler.table._free.append(scheduler.table._free[0])
    owners = [problem.split(":")[0] for problem in problems_of(scheduler.checks())]
    assert owners == ["request table", "scheduler"]
