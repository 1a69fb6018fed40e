"""Clusters for benchmarks: `tandem up` as a user would start it, and loads on it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from deploy.bench.config import BenchConfig
from deploy.bench.load import Measured
from deploy.bench.run import measure
from deploy.bench.stats import Summary, summarize
from service.process.start import die_with_parent
from tools.family import children, family

ROOT = Path(__file__).resolve().parents[1]
START_S = 300.0
END_S = 10.0
ANSWER_S = 600.0


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
def tandem_up(*args: str, tree: Path = ROOT) -> Iterator[Cluster]:
    """`tandem up --port 0 ARGS` of a source tree until the block ends; its text goes to stderr."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        ready_file = Path(folder) / "ready.json"
        argv = [sys.executable, "-m", "deploy", "up", "--port", "0", "--ready-file", str(ready_file), *args]
        begin = time.monotonic()
        process = subprocess.Popen(
            argv,
            stdout=sys.stderr,
            cwd=tree,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _path_with(tree)},
            preexec_fn=die_with_parent(),
        )
        try:
            ready = _wait_ready(process, ready_file, argv)
            workers = tuple((worker["role"], worker["url"]) for worker in ready["workers"])
            pids = (("up", process.pid), *((worker["role"], worker["pid"]) for worker in ready["workers"]))
            yield Cluster(ready["router"], time.monotonic() - begin, workers, pids)
        finally:
            _end(process)


def _path_with(tree: Path) -> str:
    """`tree` before what is on PYTHONPATH already."""
    return os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])


def pin_tree(root: psutil.Process, *cores: int) -> None:
    """Move every thread of a process and its descendants to `cores`; new threads inherit it."""
    for process in family(root.pid):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, cores)


def pin(cluster: Cluster, cores: Mapping[str, Sequence[int]]) -> None:
    """Pin every worker and its family to the cores of its role, and what else the launcher has started to those of "router"."""
    (up,) = [pid for role, pid in cluster.pids if role == "up"]
    workers = {pid: role for role, pid in cluster.pids if role != "up"}
    for child in sorted(children(up), key=lambda child: child.pid in workers):  # a fork server's children are workers'
        pin_tree(child, *cores[workers.get(child.pid, "router")])


def load(*, url: str, compare: str | None = None, **flags: Any) -> list[Summary]:
    """Put load on one URL, or on two in turns; a summary for each. Raises when a request was not answered."""
    found = load_records(url=url, compare=compare, **flags)
    return [summarize(one.records, duration_s=one.duration_s) for one in found]


def load_records(*, url: str, compare: str | None = None, **flags: Any) -> list[Measured]:
    """As `load`: the records of every request."""
    found = asyncio.run(measure(BenchConfig(url=url, compare=compare, disable_progress=True, **flags)))
    if errors := [record.error for one in found for record in one.records if record.error is not None]:
        raise RuntimeError(f"requests failed: {errors}")
    return found


def post(url: str, body: Mapping[str, Any], path: str = "/generate") -> Any:
    """Send JSON; the answer's. Raises for any other status than 200."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return json.load(answer)


@contextmanager
def answering(argv: Sequence[str], url: str) -> Iterator[psutil.Process]:
    """Run a program until the block ends, which begins once `url` answers (200, or 503: a router without workers serves)."""
    process = subprocess.Popen(argv, stdout=sys.stderr, cwd=ROOT, preexec_fn=die_with_parent())
    try:
        deadline_s = time.monotonic() + START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"did not start: {' '.join(argv)}")
            time.sleep(0.005)
        yield psutil.Process(process.pid)
    finally:
        _end(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 503
    except OSError:
        return False


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
