"""What each signal asks for, in a real process's loop."""

import asyncio
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from service.process.stop_signals import DRAIN, END, TO_GROUPS, StopSignals

ANSWER_S = 60.0
IN_A_TERMINAL = """
import asyncio, os, signal, sys
from service.process.stop_signals import StopSignals

out = int(sys.argv[1])

async def main():
    signals, hung_up = StopSignals(), asyncio.Event()
    with signals.caught(on_hangup=hung_up.set):
        os.write(out, b"s")
        os.kill(os.getpid(), signal.SIGHUP)
        await hung_up.wait()
        hung_up.clear()
        os.write(out, b"r" if not signals.requested.is_set() else b"?")
        ways = [asyncio.create_task(event.wait()) for event in (signals.at_once, hung_up)]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        os.write(out, b"e" if signals.at_once.is_set() else b"h")

if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
asyncio.run(main())
"""
FLEET_IN_A_TERMINAL = """
import os, signal, sys
from router.fleet import _Fleet
from service.process.stop_signals import END

out, said = int(sys.argv[1]), []

class Member:
    def send(self, number):
        if number != signal.SIGKILL:
            said.append(number)
            os.write(out, {signal.SIGHUP: b"r", END: b"e"}[number])

if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
with _Fleet([Member()]).signals():
    os.write(out, b"s")
    os.kill(os.getpid(), signal.SIGHUP)
    while len(said) < 2:
        signal.sigtimedwait([], 0.05)
"""
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


@pytest.mark.parametrize(
    ("script", "how", "end"),
    [
        (IN_A_TERMINAL, "", b"e"),
        (IN_A_TERMINAL, "nohup", b"h"),
        (FLEET_IN_A_TERMINAL, "", b"e"),
        (FLEET_IN_A_TERMINAL, "nohup", b"r"),
    ],
    ids=["process", "process-nohup", "router-workers", "router-workers-nohup"],
)
def test_a_hangup_ends_a_process_whose_terminal_is_gone_unless_it_is_to_outlive_it(
    script: str, how: str, end: bytes
) -> None:
    """While the terminal is there, it only says that keys are to be read again."""
    (reading, writing), (master, slave) = os.pipe(), os.openpty()

    def said() -> bytes:
        assert select.select([reading], [], [], ANSWER_S)[0], "nothing"
        return os.read(reading, 1)

    command = [sys.executable, "-c", script, str(writing), how]
    with subprocess.Popen(
        command,
        stdin=slave,
        pass_fds=(writing,),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        try:
            os.close(writing)
            os.close(slave)
            assert said() + said() == b"sr"
            os.close(master)  # the terminal
            assert said() == end and process.wait(ANSWER_S) == 0
        finally:
            process.kill()
            os.close(reading)


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
