"""Seconds from the start of a process until it answers, and whether torch came along where it must not.

usage: python -m benchmarks.start_time [--rounds 5] [--output FILE]

`tandem up` is ready when router and workers are healthy; router and bootstrap server when /health answers 200 or 503 (a
router without workers is not healthy, but serves). Imports are read from the process's memory map: a library that was
loaded is in it.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import tandem_up
from deploy.bench import environment
from deploy.bench.report import table
from deploy.launcher.ports import free_ports

START_S = 60.0
CLUSTERS = {
    "`tandem up --unified`": ["--unified"],
    "`tandem up`, nixl": [],
    "`tandem up`, mooncake": ["--transfer-backend", "mooncake"],
}
NO_WORKER = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
ALONE = {"`tandem router`": ["router", *NO_WORKER], "`tandem bootstrap`": ["bootstrap"]}


def start_alone(args: list[str]) -> tuple[float, bool]:
    """(seconds until HTTP answers, whether torch was loaded)."""
    port = free_ports(1)[0]
    begin = time.monotonic()
    argv = [sys.executable, "-m", "deploy", *args, "--port", str(port)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() - begin > START_S:
                raise RuntimeError(f"did not start: {' '.join(argv)}")
            time.sleep(0.005)
        taken_s = time.monotonic() - begin
        return taken_s, "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def start_cluster(args: list[str]) -> float:
    with tandem_up(*args) as cluster:
        return cluster.ready_s


def measure(*, rounds: int) -> dict[str, Any]:
    """Every process in turns, round by round, so that a slow minute of the machine falls on all."""
    seconds: dict[str, list[float]] = {name: [] for name in (*CLUSTERS, *ALONE)}
    torch = dict.fromkeys(ALONE, False)
    for _ in range(rounds):
        for name, args in CLUSTERS.items():
            seconds[name].append(start_cluster(args))
        for name, args in ALONE.items():
            taken_s, loaded = start_alone(args)
            seconds[name].append(taken_s)
            torch[name] |= loaded
    return {
        "rounds": rounds,
        "rows": [{"name": name, "p50_s": median(all_s), "worst_s": max(all_s)} for name, all_s in seconds.items()],
        "torch": torch,
    }


def render(result: dict[str, Any]) -> str:
    rows = [[row["name"], f"{row['p50_s']:.2f}", f"{row['worst_s']:.2f}"] for row in result["rows"]]
    loaded = [name for name, loaded in result["torch"].items() if loaded]
    said = f"torch was loaded by {', '.join(loaded)}." if loaded else "Router and bootstrap server load no torch."
    return table(["", f"p50 of {result['rounds']}, s", "worst, s"], rows) + f"\n\n{said}"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1.0):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    result = {"environment": environment.describe(), **measure(rounds=args.rounds)}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
