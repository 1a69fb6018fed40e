"""What each signal asks for, in a real process's loop."""

import asyncio
import os
import signal

import pytest

from lifecycle.stop_signals import StopSignals

ANSWER_S = 10.0


@pytest.mark.parametrize(
    ("sent", "asked", "at_once"),
    [
        ([signal.SIGTERM], True, False),
        ([signal.SIGTERM, signal.SIGTERM], True, True),
        ([signal.SIGTERM, signal.SIGINT], True, True),
        ([signal.SIGINT], True, True),
        ([signal.SIGHUP], False, False),
    ],
)
def test_what_signals_ask_for(sent: list[signal.Signals], asked: bool, at_once: bool) -> None:
    async def scenario() -> tuple[bool, bool]:
        signals, hung_up = StopSignals(), asyncio.Event()
        with signals.caught(on_hangup=hung_up.set):
            for number in sent:
                os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGHUP)  # the last: handlers are called in order
            await asyncio.wait_for(hung_up.wait(), ANSWER_S)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return signals.asked.is_set(), signals.at_once.is_set()

    assert asyncio.run(scenario()) == (asked, at_once)


def test_who_is_told_by_others_when_to_end_catches_only_the_hangup() -> None:
    async def scenario() -> None:
        signals, hung_up = StopSignals(), asyncio.Event()
        with signals.caught(on_hangup=hung_up.set, only_hangup=True):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.wait_for(hung_up.wait(), ANSWER_S)

    asyncio.run(scenario())
