"""A pair of managers in this process, workers in processes of their own, and how tests wait."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.transfer.pool import Pool
from transfer_backends.contract import FakeEngine, LookupFailed, Route, SourcePages, TargetPages, TransferConfig
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.liveness import ProcessMark
from transfer_backends.ports import Lookup
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.sides import KVPoll

ROOT = Path(__file__).resolve().parents[2]


class ChildError(Exception):
    """The child's call raised."""


def until(condition: Callable[[], Any], *, timeout_s: float = 10.0, what: str = "") -> Any:
    """Poll until the condition holds; its value."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what or condition}"
        time.sleep(0.0005)


def meet(prefill: "ChildWorker", room: int, receiver: Any, pages: Sequence[int], metadata_row: int = 0) -> None:
    """The receiver's pages are known to the prefill worker, which has a sender of the room."""
    until(lambda: receiver.poll() is KVPoll.WaitingForInput)
    receiver.provide(TargetPages(pages, metadata_row))
    until(lambda: prefill.poll(room) is KVPoll.WaitingForInput)


def join(sender: Any, receiver: Any, pages: Sequence[int], metadata_row: int = 0) -> None:
    """The receiver's pages are known to prefill, both ends in this process."""
    until(lambda: receiver.poll() is KVPoll.WaitingForInput)
    receiver.provide(TargetPages(pages, metadata_row))
    until(lambda: sender.poll() is KVPoll.WaitingForInput)


def succeed(sender: Any, receiver: Any) -> None:
    """Both ends report success and are closed."""
    until(lambda: receiver.poll() is KVPoll.Success and sender.poll() is KVPoll.Success)
    sender.close()
    receiver.close()


class ChildWorker:
    """Calls `worker_child.Child`'s methods by name. `with` ends the process whatever happens."""

    def __init__(self, *, env: Mapping[str, str] | None = None, **spec: Any) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        command = [sys.executable, "-m", "tests.transfer.worker_child", json.dumps(spec)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=env, text=True
        )
        try:
            assert self._read() == "ready"
        except BaseException:  # its pipes would fail a later test, in which they are collected
            self.__exit__()
            raise

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the child ended with status {self.process.wait()}")
        return json.loads(line)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([name, *values]) + "\n")
            self.process.stdin.flush()
            ok, value = self._read()
            if not ok:
                raise ChildError(value)
            return value

        return call

    def poll(self, room: int) -> KVPoll:
        return KVPoll(self.state(room)[0])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> "ChildWorker":
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.close()
            self.process.wait(60)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@dataclass
class Workers:
    """Starts managers; they are checked, and end with the block. `config`: of each."""

    ends: ExitStack
    config: TransferConfig

    def decode(self, look_up: Lookup, *, pool: Pool | None = None) -> DecodeManager:
        pool = pool or Pool(num_pages=16, page_bytes=64, seed=0)
        return self._started(DecodeManager(pool.args, FakeEngine(), self.config, lookup=look_up))

    def prefill(self, *followers: ProcessMark) -> PrefillManager:
        args = Pool(num_pages=16, page_bytes=64, seed=1).args
        return self._started(PrefillManager(args, FakeEngine(), self.config, followers=followers))

    def _started(self, manager: Any) -> Any:
        manager.start()
        self.ends.callback(manager.close)
        self.ends.callback(manager.check)
        return manager


class Pair:
    """A prefill and a decode manager in one process. `config` goes to both, `sides` to one each. `route` None: not found."""

    def __init__(
        self, engine: Any = None, *, sides: tuple[Any, Any] = ({}, {}), num_pages: int = 64, **config: Any
    ) -> None:
        self.pools = [Pool(num_pages=num_pages, page_bytes=64, seed=i) for i in range(2)]
        one, two = (TransferConfig(**{**config, **side}) for side in sides)
        self.engine = engine or FakeEngine()
        self.prefill = PrefillManager(self.pools[0].args, self.engine, one)
        self.route: Route | None = Route(self.prefill.control_address, self.prefill.incarnation)
        self.decode = DecodeManager(self.pools[1].args, FakeEngine(), two, lookup=self._look_up)
        self.prefill.start()
        self.decode.start()

    def _look_up(self, bootstrap: str, room: int, any_but: object) -> Route:
        if self.route is None:
            raise LookupFailed("no worker is registered")
        return self.route

    def open(self, room: int) -> tuple[Any, Any]:
        return self.prefill.sender(room), self.decode.receiver(room, bootstrap="b")

    def meet(self, room: int, pages: Sequence[int] = (1, 2, 3), metadata_row: int = 0) -> tuple[Any, Any]:
        """Open a room; decode's pages are known to prefill."""
        sender, receiver = self.open(room)
        join(sender, receiver, pages, metadata_row)
        return sender, receiver

    def works(self, room: int) -> None:
        """A good request is served."""
        sender, receiver = self.meet(room)
        sender.send(SourcePages([4, 5, 6], metadata_row=0))
        succeed(sender, receiver)

    @staticmethod
    def fail(sender: Any, receiver: Any) -> None:
        """Both ends fail, give their pages back and are closed."""
        until(lambda: sender.poll() is KVPoll.Failed and receiver.poll() is KVPoll.Failed)
        until(lambda: sender.released() and receiver.drained())
        sender.close()
        receiver.close()

    def close(self) -> None:
        self.prefill.check()
        self.decode.check()
        self.decode.close()
        self.prefill.close()
