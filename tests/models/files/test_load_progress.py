"""Where a user sees how far a checkpoint is loaded."""

import logging

import pytest

from engine.models.checkpoint import LINE_EVERY_S, LoadProgress


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_log_has_a_line_every_few_seconds(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO):
        progress = LoadProgress(200, bar=False, clock=clock)
        for _ in range(5):
            clock.now_s += 0.5 * LINE_EVERY_S
            progress.update(10)
        progress.close()
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights: 20 of 200 tensors (10%) in 10 s",
        "loading weights: 40 of 200 tensors (20%) in 20 s",
    ]
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar_and_no_lines(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO):
        progress = LoadProgress(2, bar=True, clock=clock)
        clock.now_s += 10 * LINE_EVERY_S
        progress.update(2)
        progress.close()
    assert "100%" in capsys.readouterr().err and caplog.records == []
