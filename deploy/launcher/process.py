"""A child of the launcher, in a process group of its own.

The group shields it from Ctrl-C, and one kill reaches its children.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from deploy.launcher import guard
from deploy.launcher.plan import TANDEM, ProcessSpec
from engine.ipc import IPC_PREFIX
from service.process.child_process import HTTP_SERVER_VARIABLE, ChildProcess, forked, server_in
from service.process.files import socket_folder
from service.process.start import die_with_parent
from service.process.stop_signals import DRAIN, END

LOG_TAIL_BYTES = 16384
_ERROR_LINE = re.compile(r"(^\w*(Error|Exception)\b|\berror\b|\bfatal\b)", re.IGNORECASE)


class Guard:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__)), own_prefix()],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guard, which kills groups still watched."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a killed guard must not end the cluster
            self._process.stdin.write(line)
            self._process.stdin.flush()


class Child:
    def __init__(
        self, spec: ProcessSpec, process: ChildProcess, log_path: Path, watcher: Guard, *, log_start: int
    ) -> None:
        self.spec = spec
        self.log_path = log_path
        self._log_start = log_start  # bytes by earlier processes of this name
        self._process = process
        self._guard = watcher
        self._reaped = False

    @classmethod
    def start(
        cls, spec: ProcessSpec, *, log_dir: Path, watcher: Guard, env: Mapping[str, str], again: bool = False
    ) -> Self:
        """`spec.env` overrides `env`. `again`: keep its log."""
        log_path = log_dir / f"{spec.name}.log"
        with log_path.open("ab" if again else "wb") as log:
            log_start = log.tell()
            process = _started(spec.argv, {"PYTHONUNBUFFERED": "1", **env, **spec.env}, log.fileno())
        watcher.watch(process.pid)
        return cls(spec, process, log_path, watcher, log_start=log_start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self.exit_status() is None

    def exit_status(self) -> int | None:
        """None while it runs. Its end kills its group and removes its files."""
        status = self._process.poll()
        if status is not None and not self._reaped:
            self._reaped = True
            self._kill_group()
            guard.clear(self.pid, own_prefix())
            self._guard.forget(self.pid)
        return status

    def drain(self) -> None:
        if self.alive:
            self._process.send_signal(DRAIN)

    def hurry(self) -> None:
        if self.alive:
            self._process.send_signal(END)

    def kill(self) -> None:
        if self.alive:
            self._kill_group()
            self._process.wait()
            self.exit_status()

    def last_line(self) -> str:
        lines = self._tail()
        return lines[-1] if lines else ""

    def last_error(self) -> str:
        lines = self._tail()
        errors = [line for line in lines if _ERROR_LINE.search(line)]
        return errors[-1] if errors else (lines[-1] if lines else "its log is empty")

    def _tail(self) -> list[str]:
        with self.log_path.open("rb") as log:
            log.seek(max(self._log_start, self.log_path.stat().st_size - LOG_TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
        return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _started(argv: Sequence[str], env: Mapping[str, str], log: int) -> ChildProcess:
    server = server_in(env, HTTP_SERVER_VARIABLE)
    if server is not None and tuple(argv[: len(TANDEM)]) == TANDEM:
        args = argv[len(TANDEM) :]
        found = forked(server, "deploy.cli", args, env=env, output=log, own_group=True, exits_hard=False)
        if found is not None:
            return found
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,
        env=env,
        preexec_fn=die_with_parent(),
    )


def own_prefix() -> str:
    return str(Path(socket_folder()) / IPC_PREFIX)
