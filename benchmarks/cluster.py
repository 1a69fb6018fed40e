"""Clusters for benchmarks: `tandem up` as a user would start it, and loads on it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.bench.config import BenchConfig
from deploy.bench.run import measure
from deploy.bench.stats import Summary, summarize
from service.process.die_with_parent import die_with_parent

START_S = 300.0
END_S = 10.0


@dataclass(frozen=True)
class Cluster:
    """A running cluster. `ready_s`: seconds from the start of `tandem up` to all healthy. `workers`: (role, url).

    `pids`: (role, process) of the workers and of "up", the launcher that all are children of.
    """

    url: str
    ready_s: float
    workers: tuple[tuple[str, str], ...] = ()
    pids: tuple[tuple[str, int], ...] = ()


@contextmanager
def tandem_up(*args: str) -> Iterator[Cluster]:
    """`tandem up --port 0 ARGS` until the block ends; its text goes to stderr."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        ready_file = Path(folder) / "ready.json"
        argv = [sys.executable, "-m", "deploy", "up", "--port", "0", "--ready-file", str(ready_file), *args]
        begin = time.monotonic()
        process = subprocess.Popen(
            argv, stdout=sys.stderr, env=os.environ | {"OMP_NUM_THREADS": "1"}, preexec_fn=die_with_parent()
        )
        try:
            ready = _wait_ready(process, ready_file, argv)
            workers = tuple((worker["role"], worker["url"]) for worker in ready["workers"])
            pids = (("up", process.pid), *((worker["role"], worker["pid"]) for worker in ready["workers"]))
            yield Cluster(ready["router"], time.monotonic() - begin, workers, pids)
        finally:
            _end(process)


def load(*, url: str, compare: str | None = None, **flags: Any) -> list[Summary]:
    """Put load on one URL, or on two in turns; a summary for each. Raises when a request was not answered."""
    config = BenchConfig(url=url, compare=compare, disable_progress=True, **flags)
    summaries = asyncio.run(_load(config))
    for summary in summaries:
        if summary.errors:
            raise RuntimeError(f"requests failed: {summary.errors}")
    return summaries


async def _load(config: BenchConfig) -> list[Summary]:
    async with AsyncExitStack() as stack:
        return [summarize(one.records, duration_s=one.duration_s) for one in await measure(config, stack)]


def _wait_ready(process: "subprocess.Popen[bytes]", ready_file: Path, argv: list[str]) -> dict[str, Any]:
    deadline_s = time.monotonic() + START_S
    while not ready_file.exists():
        if process.poll() is not None:
            raise RuntimeError(f"ended with status {process.returncode}: {' '.join(argv)}")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not ready after {START_S:g} s: {' '.join(argv)}")
        time.sleep(0.01)
    return dict(json.loads(ready_file.read_text()))


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
