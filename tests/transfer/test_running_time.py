"""Waits for bytes that this machine may still hold: what a clock jumped over does not count."""

import pytest

from transfer_backends.sides import MAX_A_TICK_S, RunningTime


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
