"""A step without device memory: the loop answers its requests with 503, logs it once, and serves the next."""

import logging

import pytest

from engine.messages import GenerateBatch
from tests.core.hash_model import NO_MEMORY, expected_tokens
from tests.loop.loop_in_a_test import LoopInATest
from tests.loop.test_deadlines import ask


@pytest.mark.parametrize("depth", [1, 2])
def test_its_requests_are_answered_and_the_next_one_runs(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    rig = LoopInATest(depth)
    rig.engine.model.fails = lambda plan: plan.seq == 5
    rig.tell(GenerateBatch([ask("runs", None), ask("waits", None)]))
    rig.turns(100)
    reason = rig.engine.finish["runs"]
    assert (reason.kind, reason.status) == ("abort", 503)
    assert "no memory for a step" in reason.message and "--mem-fraction-static" in reason.message
    assert rig.engine.tokens["runs"] == expected_tokens([1, 2, 3], 40)[:4]
    assert rig.engine.tokens["waits"] == expected_tokens([1, 2, 3], 40)
    assert [r.getMessage() for r in caplog.records if NO_MEMORY in r.getMessage()] == [
        f"a step of 1 requests found no device memory, and they were aborted: {NO_MEMORY}"
    ]
    rig.assert_all_back()
