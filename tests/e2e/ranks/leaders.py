"""Starts processes of a test, `tandem` ones among them as `tandem up` starts its own: forked where the environment names a server."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from service.process.child_process import HTTP_SERVER_VARIABLE, POLL_S, ChildProcess, ForkedProcess, forked, server_in
from service.process.start import die_with_parent

TANDEM = (sys.executable, "-m", "deploy")
SETTINGS_VARIABLE = "TANDEM_TEST_SETTINGS"  # of tests/e2e/settings.py
ANEW = {HTTP_SERVER_VARIABLE: ""}  # the environment of a command that is to start as users start it


class Leader(ChildProcess, Protocol):
    """As `subprocess.Popen` has it; it leads a process group of its own."""

    def wait(self, timeout: float | None = None) -> int: ...


class ForkedLeader:
    """The face of `subprocess.Popen` for a forked `tandem`."""

    def __init__(self, process: ForkedProcess) -> None:
        self.pid = process.pid
        self.poll, self.send_signal = process.poll, process.send_signal
        self.terminate, self.kill = process.terminate, process.kill

    def wait(self, timeout: float | None = None) -> int:
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_S)
        return status


def start_process(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Leader:
    """In a process group of its own, its output added to `log`; it ends with this process, should the test run be killed."""
    whole_env = {**os.environ, **(env or {})}
    with log.open("ab") as out:
        leader = _fork(command, whole_env, out.fileno())
        assert leader or SETTINGS_VARIABLE not in whole_env, (
            "not in the environment of the fork server, which reads settings"
        )
        return leader or _start_anew(command, whole_env, out.fileno())


def _fork(command: Sequence[str], env: Mapping[str, str], output: int) -> ForkedLeader | None:
    server = server_in(env, HTTP_SERVER_VARIABLE)
    if server is None or tuple(command[: len(TANDEM)]) != TANDEM:
        return None
    args = command[len(TANDEM) :]
    process = forked(server, "deploy.cli", args, env=env, output=output, own_group=True, exits_hard=False)
    return None if process is None else ForkedLeader(process)


def _start_anew(command: Sequence[str], env: Mapping[str, str], output: int) -> Leader:
    return subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent(),
        env=env,
    )
