"""Stages as points in time: each role's line, chunks, and lines that broke off."""

from engine.core.request import Times, stages
from engine.messages import Stage


def test_a_unified_request() -> None:
    times = Times(arrived_s=1.0, started_s=2.0, first_token_s=5.0, chunks=[(2.0, 8), (3.0, 4)], chunk_ends_s=[3.5])
    assert stages(times, ended_s=9.0) == [
        Stage("queue", 1.0, 2.0),
        Stage("prefill", 2.0, 5.0),
        Stage("chunk", 2.0, 3.5, 8),
        Stage("chunk", 3.0, 5.0, 4),
        Stage("decode", 5.0, 9.0),
    ]


def test_both_sides_of_a_pair() -> None:
    prefill = Times(arrived_s=1.0, bootstraps=True, queued_s=2.0, started_s=3.0, computed_s=4.0)
    assert [(s.name, s.start_s, s.end_s) for s in stages(prefill, ended_s=6.0)] == [
        ("bootstrap", 1.0, 2.0),
        ("queue", 2.0, 3.0),
        ("prefill", 3.0, 4.0),
        ("transfer", 4.0, 6.0),
    ]
    decode = Times(arrived_s=1.0, bootstraps=True, remote=True, queued_s=2.0, landed_s=6.0, first_token_s=6.0)
    assert [(s.name, s.start_s, s.end_s) for s in stages(decode, ended_s=9.0)] == [
        ("bootstrap", 1.0, 2.0),
        ("transfer_queue", 2.0, 6.0),
        ("decode", 6.0, 9.0),
    ]


def test_lines_that_broke_off() -> None:
    """The stage that a request was in when it ended ends with it."""
    for times, last in (
        (Times(arrived_s=1.0), "queue"),
        (Times(arrived_s=1.0, bootstraps=True), "bootstrap"),
        (Times(arrived_s=1.0, bootstraps=True, queued_s=2.0), "queue"),
        (Times(arrived_s=1.0, bootstraps=True, remote=True, queued_s=2.0), "transfer_queue"),
        (Times(arrived_s=1.0, started_s=2.0), "prefill"),
    ):
        found = stages(times, ended_s=9.0)
        assert found[-1].name == last and found[-1].end_s == 9.0, times
    assert stages(Times(), ended_s=9.0) == []  # it never came to the engine
