"""What is counted is exported: a counter or a queue without a metric is an error at start, not a silent loss."""

import pytest

from engine.frontend.metrics.worker import Metrics
from engine.metric_names import COUNTERS, LEVELS, check_exported, sums
from tests.loop.loop_in_a_test import LoopInATest, NotedRole
from transfer_backends.control_thread import FAULTS
from transfer_backends.sides import COUNTERS as OF_TRANSFERS


@pytest.mark.parametrize("what", ["counters", "queues"])
def test_a_loop_does_not_start_with_a_count_that_nothing_exports(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NotedRole, what, lambda role: {"lost_in_vain": 0})
    with pytest.raises(ValueError, match="no metric exports lost_in_vain"):
        LoopInATest()


def test_every_count_of_a_loop_and_its_transfers_is_a_line_of_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {name: 17.0 + i for i, name in enumerate([*OF_TRANSFERS, *FAULTS, *LEVELS])}
    monkeypatch.setattr(NotedRole, "counters", lambda role: counts)
    state = LoopInATest().loop._reporter.state("s", check=False)
    lines = Metrics(model_name="m", mode="null").exposition([state]).decode().splitlines()
    shown = {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}
    names = {name: f"{COUNTERS[name].name}_total" if name in COUNTERS else LEVELS[name].name for name in state.counters}
    assert {name: shown[metric] for name, metric in names.items()} == state.counters
    assert len(names) > len(counts) and len({*names.values()}) == len(names)


def test_counts_of_one_name_are_added() -> None:
    assert sums({"a": 1, "b": 2}, {"b": 3, "c": 4}) == {"a": 1, "b": 5, "c": 4} and sums() == {}
    check_exported(["steps", "rooms"], ["waiting"])
