"""When a peer that freezes is noticed, by the constants of workers; pauses that are none of its business."""

import pytest

from transfer_backends.contract import TransferConfig
from transfer_backends.control_thread import TICK_S
from transfer_backends.sides import MAX_A_TICK_S, Heartbeat, RunningTime

TICKS = range(int(TransferConfig.heartbeat_interval_s / TICK_S) + 1)


def new() -> Heartbeat:
    return Heartbeat(
        interval_s=TransferConfig.heartbeat_interval_s,
        max_failures=TransferConfig.heartbeat_max_failures,
        now_s=0.0,
    )


def silent_after_s(*, freezes: int, for_ticks: int) -> float | None:
    """The time from the freeze until the peer counts as silent; None: it does not. It answers a ping a tick later, or when it thaws."""
    heartbeat, answers_at = new(), None
    for tick in range(freezes + for_ticks + 200):
        frozen = freezes <= tick < freezes + for_ticks
        if answers_at is not None and tick >= answers_at and not frozen:
            answers_at = None
            heartbeat.on_message(tick * TICK_S)
        if heartbeat.due(tick * TICK_S) and answers_at is None:
            answers_at = tick + 1
        if heartbeat.silent:
            return (tick - freezes) * TICK_S
    return None


@pytest.mark.parametrize("phase", TICKS)
def test_a_freeze_is_noticed_within_a_second_and_a_half_and_a_shorter_pause_than_a_second_never(phase: int) -> None:
    after_s = silent_after_s(freezes=100 + phase, for_ticks=10**4)
    assert after_s is not None and 1.0 <= after_s <= 1.5
    assert silent_after_s(freezes=100 + phase, for_ticks=round(0.98 / TICK_S)) is None


def test_a_pause_of_our_own_process_is_one_miss_however_long_it_was() -> None:
    heartbeat = new()
    assert heartbeat.due(3600.0) and not heartbeat.due(3600.0) and not heartbeat.silent


# ---- Waits for bytes that this machine may still hold: what a clock jumped over does not count.


def test_ticks_add_up_and_a_jump_counts_for_one_tick() -> None:
    ran = RunningTime()
    for k in range(21):
        ran.tick(100.0 + 0.05 * k)
    assert ran.at(101.0) == pytest.approx(1.0)
    assert ran.at(101.03) == pytest.approx(1.03)
    ran.tick(5000.0)
    assert ran.at(5000.0) == pytest.approx(1.0 + MAX_A_TICK_S)
    ran.tick(4000.0)  # no clock of ours goes back, and nothing is taken off if one does
    assert ran.at(4000.05) == pytest.approx(1.05 + MAX_A_TICK_S)


def test_nothing_counts_before_the_first_tick() -> None:
    ran = RunningTime()
    assert ran.at(9.0) == 0.0
    ran.tick(9.0)
    assert ran.at(9.0) == 0.0
