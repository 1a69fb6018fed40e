"""What each signal asks for, in a real process's loop."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from service.process.stop_signals import DRAIN, END, TO_GROUPS, StopSignals

ANSWER_S = 60.0
ENDING = """
import asyncio, sys, uvloop
from service.process.stop_signals import StopSignals

async def main():
    signals = StopSignals()
    with signals.caught():
        print("serving", flush=True)
        await signals.requested.wait()
    print("closing", flush=True)
    await asyncio.to_thread(sys.stdin.read)

uvloop.run(main())
print("closed", flush=True)
sys.stdin.close()
"""


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*TO_GROUPS, DRAIN, END)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("sent", "asked", "at_once"),
    [
        ([signal.SIGTERM], True, False),
        ([signal.SIGTERM, signal.SIGTERM], True, True),
        ([signal.SIGTERM, signal.SIGINT], True, True),
        ([signal.SIGINT], True, True),
        ([signal.SIGHUP], False, False),
        ([DRAIN], True, False),
        ([DRAIN, DRAIN], True, False),
        ([signal.SIGTERM, DRAIN], True, False),
        ([DRAIN, signal.SIGTERM], True, False),
        ([DRAIN, signal.SIGTERM, signal.SIGTERM], True, True),
        ([END], True, True),
    ],
)
async def test_what_signals_ask_for(sent: list[signal.Signals], asked: bool, at_once: bool) -> None:
    signals, hung_up = StopSignals(), asyncio.Event()
    with signals.caught(on_hangup=hung_up.set):
        for number in sent:
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGHUP)  # the last: handlers are called in order
        await asyncio.wait_for(hung_up.wait(), ANSWER_S)
    assert (signals.requested.is_set(), signals.at_once.is_set()) == (asked, at_once)


async def test_a_process_that_its_parent_ends_catches_only_the_hangup() -> None:
    signals, hung_up = StopSignals(), asyncio.Event()
    with signals.caught(on_hangup=hung_up.set, only_hangup=True):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(hung_up.wait(), ANSWER_S)


def test_no_signal_breaks_what_is_done_at_the_end() -> None:
    """Ctrl-C may come when the loop is being closed, and so may a signal of `tandem up`."""
    with subprocess.Popen([sys.executable, "-c", ENDING], stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            assert process.stdout.readline() == "serving\n"
            process.terminate()
            assert process.stdout.readline() == "closing\n"
            process.send_signal(signal.SIGINT)
            process.terminate()
            process.send_signal(DRAIN)
            process.send_signal(END)
            process.stdin.close()
            assert (process.stdout.read(), process.stderr.read(), process.wait(ANSWER_S)) == ("closed\n", "", 0)
        finally:
            process.kill()
