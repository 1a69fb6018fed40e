"""`python -m tools.faults.stores`: every fault of a Mooncake Store, simulated ones, and how fast its pages move; 15 minutes."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from service.waiter import usable_cores
from tools.faults.stores.processes import Processes, processes
from tools.faults.stores.rows import FAST, SLOW
from tools.simulation import stores

REPORT = Path(__file__).resolve().parents[3] / "docs" / "reports" / "store.md"
SIZES_KIB = (64, 256, 1024, 4096)
MOVED_BYTES = 256 << 20
TEXT = """# Faults of the shared store

`make store-faults` writes this page: a real `mooncake_master` and processes with the product's store, threads and breaker
([hierarchical cache](../hierarchical-cache.md#a-shared-store)). Do not edit it by hand.

{where}

| fault | what is seen |
|---|---|
{faults}

In every row no wrong byte is read, and no turn of the scheduler's loop waits for the store.

## Simulated

`make sim-stores` plays workers of both roles over a store that loses, delays and answers with stale values, in virtual time, and compares each
token with the right one.

| what | times |
|---|---|
{simulated}

## Pages a second

Holder and reader are two processes on this machine, over TCP, with checksums, through the product's threads. GB of 10^9 bytes.

| page | written | read |
|---|---|---|
{rates}
"""


def rates(all_of: Processes, size_kib: int) -> str:
    size = size_kib << 10
    at_once = min(64, MOVED_BYTES // size)
    master = all_of.master()
    all_of.store(master, page_bytes=size, segment="512mb")
    reader = all_of.store(master, page_bytes=size, segment="0", timeout_s=60.0)
    taken = {"write": 0.0, "read": 0.0}
    for begin in range(0, MOVED_BYTES // size, at_once):
        keys = list(range(begin, begin + at_once))
        written = reader.ask("write", keys=keys, fill=1)
        read = reader.ask("read", keys=keys, fill=1)
        assert written["ok"] == at_once and read["ends"] == {"right": at_once}, (written, read)
        taken["write"] += written["moved_s"]
        taken["read"] += read["moved_s"]
    whole = MOVED_BYTES // size // at_once * at_once * size
    cells = [f"{whole / taken[way] / 1e9:.2f} GB/s, {whole / size / taken[way]:,.0f} pages/s" for way in taken]
    return f"| {size_kib} KiB | {cells[0]} | {cells[1]} |"


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults.stores", description=__doc__)
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--seeds", type=int, default=1000, help="simulated")
    args = parser.parse_args()
    faults = []
    for name, act in (FAST | SLOW).items():
        with processes() as all_of:
            faults.append(f"| {name} | {act(all_of)} |")
        print(faults[-1], flush=True)
    lines = []
    for size_kib in SIZES_KIB:
        with processes() as all_of:
            lines.append(rates(all_of, size_kib))
        print(lines[-1], flush=True)
    simulated = stores.simulate(range(1, 1 + args.seeds))
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    where = f"{time.strftime('%Y-%m-%d')}, commit {commit()}, {usable_cores()} cores of {cpu.partition(': ')[2]}, no GPU; load average {os.getloadavg()[0]:.0f}."
    counted = "\n".join(f"| {what} | {times:,} |" for what, times in simulated.items())
    text = TEXT.format(where=where, faults="\n".join(faults), rates="\n".join(lines), simulated=counted)
    args.report.write_text(text)
    print(f"written: {args.report}")
    return int(simulated["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
