"""When followers are asked whether they take messages, and when one has been silent for too long."""

from engine.ranks.followers import LivenessProbe


def test_one_question_at_a_time_and_steps_may_be_ahead_of_it() -> None:
    call = LivenessProbe(8.0)
    assert call.every_s == 2.0
    assert call.due(100.0) and not call.due(103.0), "the first is not answered"
    assert call.late_s(116.0) is None
    call.answered()
    assert not call.due(101.9) and call.due(102.0)
    assert call.late_s(118.0) is None and call.late_s(118.5) == 16.5


def test_no_limit_asks_nothing() -> None:
    call = LivenessProbe(0.0)
    assert call.every_s is None and not call.due(1000.0) and call.late_s(1e6) is None
