"""Heartbeat thread of the scheduler process, alive during steps.

Kernels and device waits release the GIL: silence means a frozen or dead process.
"""

import contextlib
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable

from engine.core.plan import Plan
from engine.ipc import IpcPaths, PeerStalled, PullSocket, PushSocket
from engine.messages import GetStep, StepInfo, StepReply
from engine.stamps import Stamp
from service.http.heartbeats import EVERY_S, STAMPS, wait_s


class IterationClock:
    """Activity of the loop's thread and its start, for any thread.

    `limit_s`: longest iteration, 0 or less for none. Loading is unlimited.

        loading --loaded--> resting <--turning, resting--> turning        any --end--> ended

    An iteration has at most one step. The loop takes no lock: a reader may miss a new iteration's
    step.
    """

    def __init__(self, *, limit_s: float, now_s: float = 0.0) -> None:
        self.limit_s = limit_s
        self._loading_since_s: float | None = now_s
        self._turning_since_s: float | None = None
        self._plan: Plan | None = None
        self._ended = False
        self._num_steps = 0

    def loaded(self) -> None:
        self._loading_since_s = None

    def turning(self, now_s: float) -> None:
        self._plan = None
        self._turning_since_s = now_s

    def computing(self, plan: Plan | None) -> None:
        self._plan = plan
        self._num_steps += plan is not None

    def resting(self) -> None:
        self._turning_since_s = None

    def end(self) -> None:
        self._ended = True
        self._turning_since_s = None

    def stalled_s(self, now_s: float) -> float | None:
        """Duration of an iteration beyond the limit."""
        since_s = self._turning_since_s
        if since_s is None or self.limit_s <= 0 or now_s - since_s <= self.limit_s:
            return None
        return now_s - since_s

    def stamp(self, stamp: Stamp, now_s: float) -> None:
        if not self._ended:
            stamp.write(now_s, busy_since_s=self._turning_since_s, num_steps=self._num_steps)

    def answer(self, call_id: str, now_s: float) -> StepReply | None:
        if self._ended:
            return None
        if (loading_since_s := self._loading_since_s) is not None:
            return StepReply(call_id, now_s - loading_since_s, loading=True)
        since_s, plan = self._turning_since_s, self._plan
        if since_s is None:
            return StepReply(call_id, None)
        stalled = self.stalled_s(now_s) is not None
        return StepReply(call_id, now_s - since_s, stalled=stalled, step=None if plan is None else _info(plan))


def _info(plan: Plan) -> StepInfo:
    return StepInfo(
        seq=plan.seq, kind=_kind(plan), num_reqs=len(plan.items), num_tokens=sum(item.q_len for item in plan.items)
    )


def _kind(plan: Plan) -> str:
    if not plan.items:
        return "copy"  # pages between tiers
    if plan.skips_model:
        return "draft"
    if not plan.extend:
        return "decode"
    return "prefill" if all(item.extend for item in plan.items) else "mixed"


log = logging.getLogger(__name__)


class HeartbeatResponder:
    """Stamps every EVERY_S, and answers `GetStep`, until the loop ends."""

    def __init__(
        self,
        ipc: IpcPaths,
        turns: IterationClock,
        *,
        name: str = "scheduler",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._turns = turns
        self._clock = clock
        self._inbox: PullSocket[GetStep] = PullSocket(ipc.to_heartbeat, GetStep)
        self._frontend = PushSocket(ipc.to_frontend)
        self._stamp = Stamp(ipc.dir, name)
        self._closed = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            os.eventfd_write(self._closed, 1)
            self._thread.join()
        for socket in (self._inbox, self._frontend):
            socket.close()
        os.close(self._closed)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._inbox.fd, select.POLLIN)
        poll.register(self._closed, select.POLLIN)
        while not any(
            source == self._closed for source, _ in poll.poll(1000 * wait_s(time.monotonic(), EVERY_S, phase=STAMPS))
        ):
            self._turns.stamp(self._stamp, self._clock())
            for request in self._inbox.recv_all_nowait():
                self._answer(request)

    def _answer(self, request: GetStep) -> None:
        reply = self._turns.answer(request.call_id, self._clock())
        if reply is None:
            return
        try:
            self._frontend.send(reply)
        except PeerStalled as error:
            log.error("heartbeat: %s", error)


# ---- End of a process with a hanging loop, since a router still sends it requests.


EXIT_STATUS = 70  # EX_SOFTWARE: a bug, not an operating error
CHECKS_PER_TIMEOUT = 20
LONGEST_CHECK_S = 5.0
ASKED = signal.SIGUSR1
DUMP_S = 0.5


def end_with_stacks(stalled_s: float, *, found: str = "") -> None:
    why = f"--watchdog-timeout; it {found}" if found else "--watchdog-timeout"
    end_process(f"scheduler: the loop has not turned for {stalled_s:.1f} s ({why})")


def end_process(why: str) -> None:
    """Write `why` and all stacks to stderr, and end at once."""
    print(f"{why}; stacks follow", file=sys.stderr)
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
    os._exit(EXIT_STATUS)


def dump_when_asked() -> None:
    """Write all stacks to stderr on ASKED, even if Python hangs."""
    faulthandler.register(ASKED, file=sys.stderr, all_threads=True)


def dump_of_others(pids: Iterable[int]) -> None:
    """Trigger `dump_when_asked` in processes, and wait."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, ASKED)
    time.sleep(DUMP_S)


class Watchdog:
    """`on_stall` receives seconds."""

    def __init__(self, turns: IterationClock, *, on_stall: Callable[[float], None] = end_with_stacks) -> None:
        self._turns = turns
        self._on_stall = on_stall
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        if self._turns.limit_s > 0:
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        check_s = min(LONGEST_CHECK_S, self._turns.limit_s / CHECKS_PER_TIMEOUT)
        while not self._closed.wait(check_s):
            if (taken_s := self._turns.stalled_s(time.monotonic())) is not None:
                self._on_stall(taken_s)
                return
