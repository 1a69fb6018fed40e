"""Two-batch overlap where it measures faster: what the times say, and that ranks measure both forms of the same steps."""

import logging
from typing import Any

import pytest

from engine.core.plan import Plan
from engine.core.split_rule import SplitRule
from engine.device.split_times import ALWAYS, StepTimes, rule_of
from engine.executor.halved_pass import HalvedPass
from engine.ranks.leading_executor import LeadingExecutor
from tests.engine.engine_in_process import prompt_of
from tests.engine.ranks_in_process import ranks
from tests.models.tiny_checkpoints import make_tiny_checkpoint

FLAGS: dict[str, Any] = {
    "tp_size": 2,
    "ep_size": 2,
    "page_size": 4,
    "max_total_tokens": 1024,
    "max_running_requests": 8,
    "num_threads": 1,
    "chunked_prefill_size": 32,
}


def times(rows: int, ratio: float, *, extend: bool = False) -> StepTimes:
    return StepTimes(extend, rows, 1.0, ratio)


@pytest.mark.parametrize(
    ("measured", "rule"),
    [
        ([times(4, 0.8), times(16, 0.7)], SplitRule(4, 0)),
        ([times(4, 1.2), times(16, 0.7)], SplitRule(16, 0)),
        ([times(4, 0.8), times(16, 1.1)], SplitRule(0, 0)),  # larger ones were slower
        ([times(16, 0.99)], SplitRule(0, 0)),  # noise
        ([times(16, 1.5), times(64, 0.5, extend=True), times(256, 0.6, extend=True)], SplitRule(0, 64)),
        ([], SplitRule(0, 0)),
    ],
)
def test_steps_are_halved_from_the_size_on_that_was_faster(measured: list[StepTimes], rule: SplitRule) -> None:
    assert rule_of(measured) == rule


def test_at_start_all_ranks_run_both_forms_and_the_log_says_what_was_found(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="engine.device.split_times")
    path = make_tiny_checkpoint(tmp_path, "qwen3_moe", dtype="bfloat16")
    launched: list[Plan] = []
    launch = LeadingExecutor.launch
    monkeypatch.setattr(LeadingExecutor, "launch", lambda self, plan: (launched.append(plan), launch(self, plan))[1])
    with ranks(path, enable_two_batch_overlap="auto", **FLAGS) as group:
        choice = group.engine.parts.halves
        assert choice is not None and choice.mode == "auto"
        assert [(one.extend, one.rows) for one in choice.times] == [(False, 2), (False, 8), (True, 8), (True, 34)]
        assert all(one.whole_s > 0 and one.halves_s > 0 for one in choice.times)
        forms = {(plan.extend, sum(item.q_len for item in plan.items), plan.cut > 0) for plan in launched if plan.items}
        assert forms == {(one.extend, one.rows, halved) for one in choice.times for halved in (False, True)}
        assert choice.rule == rule_of(choice.times) == group.engine.parts.scheduler.split_rule
        assert "prompt steps of 34 rows: " in str(choice.described()["two_batch_times"])
        group.engine.add("r", prompt_of(20, 1), max_new_tokens=4)
        group.engine.run()
        assert len(group.engine.tokens["r"]) == 4
    assert caplog.messages[-1].startswith("two-batch overlap: decode steps ")


def test_on_measures_nothing_and_off_has_no_part_of_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3_moe", dtype="bfloat16")
    with ranks(path, enable_two_batch_overlap="on", **FLAGS) as group:
        choice = group.engine.parts.halves
        assert choice is not None and (choice.rule, choice.times) == (ALWAYS, ())
    monkeypatch.setattr(HalvedPass, "__init__", None)  # it would raise
    with ranks(path, **FLAGS) as group:
        assert group.engine.parts.halves is None
        group.engine.add("r", prompt_of(20, 1), max_new_tokens=4)
        group.engine.run()
        assert len(group.engine.tokens["r"]) == 4
