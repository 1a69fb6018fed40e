"""Processes that compute runs side by side, and the threads that wait for them. They exchange JSON lines."""

import queue
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import msgspec

from planner.config import PlanConfig
from planner.goodput import Point
from planner.layout import ClusterLayout


class RunPool:
    """A context manager; the processes end with the block, and with this process (their stdin closes)."""

    def __init__(self, config: PlanConfig, *, jobs: int) -> None:
        self._children = [_start(config) for _ in range(jobs)]
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for child in self._children:
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(jobs)

    def submit(self, layout: ClusterLayout, rate: float) -> "Future[Point]":
        return self._threads.submit(self._run, layout, rate)

    def __enter__(self) -> "RunPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            child.kill()
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.communicate()

    def _run(self, layout: ClusterLayout, rate: float) -> Point:
        child = self._idle.get()
        try:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(msgspec.json.encode((layout.name, rate)) + b"\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        finally:
            self._idle.put(child)
        if not answer:
            raise RuntimeError(f"the run of {layout.name} at {rate:.3g} failed; see the error of its process above")
        return msgspec.json.decode(answer, type=Point)


def _start(config: PlanConfig) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-P", "-m", "planner.child"]  # -P: a folder "planner" in the user's directory is not ours
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(config) + b"\n")
    child.stdin.flush()
    return child
