"""Memory of an idle worker in the router: a whole router that watches so many workers, in a process of its own.

usage: python -m benchmarks.scale_idle WORKERS PORT [--seconds S]     (benchmarks/scale.py runs it)

The workers are addresses of 127.0.0.0/8 that all lead to one process (benchmarks/instant_worker.py): each has its own URL, its
checks every second, its reports, and its kept-alive connections, so the sockets and buffers of this process count, too; what
the kernel has for them does not. Prints JSON: memory once all are up and were checked for a while.
"""

import argparse
import asyncio
import gc
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from router.config import RouterConfig
from router.pool.states import Health
from router.server import start_router
from service.process.start import allow_many_files

START_S = 30.0
UP_S = 60.0
ROOT = Path(__file__).resolve().parents[1]


def address(number: int) -> str:
    """Of worker `number`."""
    return f"127.1.{number >> 8}.{number & 255}"


async def watch(workers: int, port: int, *, seconds: float) -> dict[str, float]:
    """A router with so many workers, after `seconds` of checks."""
    urls = [f"http://{address(i)}:{port}" for i in range(workers)]
    config = RouterConfig(port=0, worker_urls=tuple(urls))
    async with start_router(config) as router:
        until_s = time.monotonic() + UP_S
        while any(worker.health is not Health.UP for worker in router.table.workers()):
            assert time.monotonic() < until_s, "the workers did not come up"
            await asyncio.sleep(0.05)
        cpu_s = time.process_time()
        await asyncio.sleep(seconds)
        cpu_s = time.process_time() - cpu_s
        assert all(worker.report is not None for worker in router.table.workers()), "not all have reported"
        gc.collect()
        return {"workers": workers, "bytes": _resident_bytes(), "cpu_s_per_s": cpu_s / seconds if seconds else 0.0}


def _resident_bytes() -> int:
    """Private to this process: what shared libraries take stays out."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


@contextmanager
def one_process_for_all() -> Iterator[int]:
    """Runs the workers; their port."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "benchmarks.instant_worker", str(port), "--host", "0.0.0.0"]
    process = subprocess.Popen(argv, cwd=ROOT)
    try:
        until_s = time.monotonic() + START_S
        while not _listens(port):
            assert time.monotonic() < until_s and process.poll() is None, "the workers did not start"
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def measure(workers: int, *, port: int, seconds: float) -> dict[str, float]:
    """In a process of its own."""
    argv = [sys.executable, "-m", "benchmarks.scale_idle", str(workers), str(port), "--seconds", str(seconds)]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workers", type=int)
    parser.add_argument("port", type=int)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    print(json.dumps(uvloop.run(watch(args.workers, args.port, seconds=args.seconds))))


if __name__ == "__main__":
    allow_many_files()
    main()
