"""Clusters for benchmarks: `tandem up` as a user would start it, and loads on it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

from deploy.bench.config import BenchConfig
from deploy.bench.load import Measured
from deploy.bench.run import measure
from deploy.bench.stats import Summary, summarize
from service.process.start import die_with_parent
from tools.family import children, family

ROOT = Path(__file__).resolve().parents[1]
START_S = 300.0
END_S = 20.0
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
        if tree == ROOT and not {"--route", "--unified"} & set(args):
            argv += ["--route", "pair"]  # which figures are about
        path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        begin = time.monotonic()
        with started(argv, ready_file.exists, cwd=tree, env=env) as process:
            ready = json.loads(ready_file.read_text())
            workers = tuple((worker["role"], worker["url"]) for worker in ready["workers"])
            pids = (("up", process.pid), *((worker["role"], worker["pid"]) for worker in ready["workers"]))
            yield Cluster(ready["router"], time.monotonic() - begin, workers, pids)


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
    answer = requests.post(url + path, json=body, timeout=ANSWER_S)
    answer.raise_for_status()
    return answer.json()


@contextmanager
def answering(argv: Sequence[str], url: str) -> Iterator[psutil.Process]:
    """Run a program until the block ends, which begins once `url` answers (200, or 503: a router without workers serves)."""
    with started(argv, lambda: answers(url, 200, 503), cwd=ROOT) as process:
        yield psutil.Process(process.pid)


def answers(url: str, *statuses: int) -> bool:
    """Whether a server answers there, with one of these statuses."""
    try:
        return requests.get(url, timeout=2.0).status_code in statuses
    except requests.RequestException:
        return False


@contextmanager
def started(
    argv: Sequence[str], is_ready: Callable[[], bool], *, within_s: float = START_S, **options: Any
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program until the block ends, which begins once it is ready. Its text goes to stderr.

    `options`: of Popen. With a session of its own what it leaves behind ends, too.
    """
    process = subprocess.Popen(argv, stdout=sys.stderr, preexec_fn=die_with_parent(), **options)
    try:
        deadline_s = time.monotonic() + within_s
        while not is_ready():
            if process.poll() is not None:
                raise RuntimeError(f"ended with status {process.returncode}: {' '.join(argv)}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not ready after {within_s:g} s: {' '.join(argv)}")
            time.sleep(0.005)
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                if options.get("start_new_session"):
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)
                process.wait(timeout=END_S)
