"""A real `mooncake_master`, and processes with the product's store and threads, which tests and the report ask over pipes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
START_S = 60.0
ANSWER_S = 120.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def alive(process: "subprocess.Popen[Any]") -> bool:
    return process.poll() is None


def _freeze(process: "subprocess.Popen[Any]") -> None:
    process.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


class Master:
    """Lives again at the same address after `kill` and `start`, with nothing in it."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._ports = free_port(), free_port()
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    def start(self) -> None:
        binary = Path(sys.executable).with_name("mooncake_master")
        rpc, metrics = self._ports
        command = [str(binary), f"--rpc_port={rpc}", f"--metrics_port={metrics}", "--client_ttl=2", *self._flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", rpc), timeout=1):
                return
            assert alive(self.process) and time.monotonic() < deadline_s, "mooncake_master does not start"
            time.sleep(0.01)

    def stop(self) -> None:
        _freeze(self.process)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class StoreProcess:
    """`ask(what, ...)`: a call of tools/faults/stores/worker.py, which measures it. `extra`: of the flag's JSON."""

    def __init__(self, master: str, *, page_bytes: int, segment: str = "64mb", **extra: Any) -> None:
        config = {"master_server_address": master, "global_segment_size": segment, **extra}
        command = [sys.executable, "-m", "tools.faults.stores.worker", json.dumps(config), str(page_bytes)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ, text=True
        )
        assert self._line() == {"ready": True}

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """`seconds`: that it took; the rest is the call's."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"what": what, **fields}) + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the store's process has ended: {self.process.wait()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        _freeze(self.process)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Processes:
    """All that is started ends with it."""

    def __init__(self) -> None:
        self._started: list[Master | StoreProcess] = []
        self._plain: StoreProcess | None = None

    def master(self, *flags: str) -> Master:
        master = Master(*flags)
        self._started.append(master)
        return master

    def plain(self) -> StoreProcess:
        """One for all rows that break nothing, with nothing in it."""
        if self._plain is None:
            self._plain = self.store(self.master())
        self._plain.ask("clear")
        return self._plain

    def store(self, master: Master, *, page_bytes: int = 1024, **extra: Any) -> StoreProcess:
        store = StoreProcess(master.address, page_bytes=page_bytes, **extra)
        self._started.append(store)
        return store


@contextlib.contextmanager
def processes() -> Iterator[Processes]:
    found = Processes()
    try:
        yield found
    finally:
        for one in found._started:
            one.kill()
