"""Child processes of a worker: one scheduler per DP rank, and further frontends.

They ignore signals to the process group, and end by END or with their parent.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.device.gpus import VISIBLE
from service.process.child_process import ChildProcess, ForkedProcess, forked, server_in
from service.process.start import die_with_parent
from service.process.stop_signals import END, TO_GROUPS

if TYPE_CHECKING:
    from engine.loop.loop import EngineLoop

END_S = 3.0  # time for a child to end before it is killed
POLL_S = 0.01
OPERATING_ERROR = 3  # exit status after an error that the child reported to the operator
# 0.2 ms at libgomp's 100 spins per us. A step has hundreds of parallel regions some 50 us apart:
# threads that sleep between them make it 1.7 times as long. On shared cores NO_SPINS is far better.
SPINS, NO_SPINS = "20000", "0"


@dataclass
class Children:
    """Child processes; `before_end` runs before they end."""

    before_end: Callable[[], None] | None = None
    _processes: dict[str, ChildProcess] = field(default_factory=dict)
    _hangup_takers: list[str] = field(default_factory=list)

    def start(
        self,
        name: str,
        module: str,
        args: Sequence[str],
        *,
        num_threads: int,
        descriptors: Sequence[int] = (),
        takes_hangup: bool = False,
        shares_cores: bool = False,
        gpu: str | None = None,
    ) -> ChildProcess:
        """Run `python -P -m module args`, forked if the environment names a fork server.

        OpenMP must know its threads before torch is imported (docs/tuning.md, "CPU workers").
        `shares_cores`: with children that compute at the same time. `takes_hangup`: `hang_up` sends
        SIGHUP.
        """
        env = {**os.environ, **openmp_env(num_threads, os.environ, shares_cores=shares_cores)}
        env |= {} if gpu is None else {VISIBLE: gpu}
        if takes_hangup:
            self._hangup_takers.append(name)
        server = None if takes_hangup else server_in(env)
        found = forked(server, module, args, env=env, descriptors=descriptors, ignored=TO_GROUPS) if server else None
        process = found or _started(module, args, env, descriptors)
        self._processes[name] = process
        return process

    def hang_up(self) -> None:
        for name in self._hangup_takers:
            self._processes[name].send_signal(signal.SIGHUP)

    def dead(self) -> str | None:
        if (found := self.first_dead()) is None:
            return None
        return f"the {found[0]} process ended (status {found[1].poll()})"

    @contextmanager
    def watched(self, on_end: Callable[[], None]) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def ended(process: ChildProcess, descriptor: int) -> None:
            if process.poll() is not None:
                loop.remove_reader(descriptor)  # it stays readable
                on_end()

        with ExitStack() as undo:
            for process in self._processes.values():
                if process.poll() is not None:  # reported before
                    continue
                descriptor = process.news() if isinstance(process, ForkedProcess) else os.pidfd_open(process.pid)
                undo.callback(os.close, descriptor)
                loop.add_reader(descriptor, ended, process, descriptor)
                undo.callback(loop.remove_reader, descriptor)
            yield

    def first_dead(self) -> tuple[str, ChildProcess] | None:
        return next((item for item in self._processes.items() if item[1].poll() is not None), None)

    def has_reported(self) -> bool:
        return any(process.poll() == OPERATING_ERROR for process in self._processes.values())

    def end(self) -> None:
        if self.before_end is not None:
            self.before_end()
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(END)
        deadline_s = time.monotonic() + END_S
        for process in self._processes.values():
            while process.poll() is None and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
            if process.poll() is None:
                process.kill()
            process.wait()


def openmp_env(num_threads: int, given: Mapping[str, str], *, shares_cores: bool) -> dict[str, str]:
    """A user's GOMP_SPINCOUNT wins.

    A single thread waits for no other, so one setting, and fork server, serves all such processes.
    """
    threads = str(num_threads)
    spins = NO_SPINS if shares_cores or num_threads == 1 else SPINS
    return {
        "GOMP_SPINCOUNT": given.get("GOMP_SPINCOUNT", spins),
        **({"OMP_THREAD_LIMIT": "1"} if num_threads == 1 else {}),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def _started(
    module: str, args: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int]
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", module, *args]  # -P: ignores a `queue.py` of the user's directory
    prepare = die_with_parent(ignored=TO_GROUPS)
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, preexec_fn=prepare, pass_fds=descriptors)


# ---- Signal handler that ends a scheduler process's loop.


def end_by_parent(loop: "EngineLoop", attention: Callable[[], None]) -> None:

    def on_end(signum: int, frame: object) -> None:
        loop.stopped = True
        attention()

    signal.signal(END, on_end)


# ---- Imports of a computing process, for a fork server (service/process/fork_server.py).

# With torch and all that a worker of any role needs of ours. What only some flags need comes later.
PRELOADED = (
    "disagg.processes.scheduler_process",
    "disagg.processes.rank_process",
    "disagg.compose",
    "disagg.decode_role",
    "disagg.processes.encoder_process",
    "disagg.processes.engine_process",
    "disagg.transfer_engine",
    "disagg.prefill_role",
    "disagg.processes.rank_group",
    "engine.assembly.follower",
    "engine.assembly.leader",
    "engine.device.machine",
    "engine.executor.profiler",
    "engine.ranks.group",
)
