"""What a request costs the router and the bootstrap server as the number of workers grows, and an idle worker's memory.

usage: python -m benchmarks.scale --trace PATH [--workers N ...] [--requests N] [--each N] [--output FILE] [--plot PNG]

The router's core in virtual time over a trace (benchmarks/scale_cluster.py): the default policy for --requests requests at the
most workers, every policy for --each at every size.
"""

import argparse
import gc
import json
import random
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.scale_cluster import ROLES, Cluster, Stopwatch, repeated
from benchmarks.scale_idle import measure, one_process_for_all
from benchmarks.trace_workers import TraceRequest, read_trace
from bootstrap_server.config import BootstrapConfig
from bootstrap_server.protocol import Registration
from bootstrap_server.registry import Registry
from deploy.bench.environment import describe
from router.attempts.request import Slo
from router.choice.policies import LeastLoad, RoutingHints
from router.config import POLICIES
from router.pool.states import Check
from service.process.start import allow_many_files

SIZES = (10, 100, 1000, 10_000)
DEFAULT = "least_load"
OBJECTIVE, TIGHT = "cache_aware, objectives", "cache_aware, objectives that few keep"
RETRY = "least_load, and a retry of each"
OBJECTIVES = {OBJECTIVE: Slo(ttft_s=3600.0), TIGHT: Slo(ttft_s=1.0, itl_s=0.5)}
MOST_WATCHED = 1000  # idle workers with sockets
PARTS = ("begin", "again", "refused", "first token", "end")
IDLE_S = 5.0
RENEW_EVERY, ANY_EVERY = 10, 20  # registry calls between two renewals, and two look-ups of any worker
SEED = 1
CHANGES = 400


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    allow_many_files()
    report = {
        "environment": describe(),
        "trace": args.trace[0].name,
        "router": router_rows(read_trace(args.trace[0]), args.workers, requests=args.requests, each=args.each),
        "changes": [change_row(count) for count in args.workers],
        "registry": [registry_row(count, args.each) for count in args.workers],
        "idle": idle(min(args.workers), min(MOST_WATCHED, max(args.workers)), seconds=args.idle_seconds),
    }
    print(render(report))
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot(report, args.plot)
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", required=True, help="JSON lines; of several the first")
    parser.add_argument("--workers", type=int, nargs="+", default=SIZES, help="of both roles together; even numbers")
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the long run")
    parser.add_argument("--each", type=int, default=50_000, help="requests of each other run")
    parser.add_argument("--idle-seconds", type=float, default=IDLE_S, help="of checks before memory is read")
    parser.add_argument("--output", type=Path, help="write the JSON here")
    parser.add_argument("--plot", type=Path, help="write a PNG here (needs matplotlib)")
    return parser.parse_args(argv)


def router_rows(trace: list[TraceRequest], sizes: tuple[int, ...], *, requests: int, each: int) -> list[dict[str, Any]]:
    """A row a run; the long one first."""
    plans = [(DEFAULT, max(sizes), requests)]
    plans += [(policy, count, each) for policy in POLICIES for count in sizes]
    plans += [(name, count, each) for name in (RETRY, OBJECTIVE, TIGHT) for count in sizes]
    return [router_row(trace, name, workers=workers, requests=count) for name, workers, count in plans]


def router_row(trace: list[TraceRequest], name: str, *, workers: int, requests: int) -> dict[str, Any]:
    """One run of one policy."""
    policy, slo = name.split(",")[0], OBJECTIVES.get(name)
    cluster = Cluster(policy, workers, slo=slo, retried=name == RETRY)
    begun_s = time.monotonic()
    with tqdm(total=requests, unit="req", desc=f"{name}, {workers} workers", mininterval=1.0) as bar:
        cluster.run(repeated(trace, requests, workers=workers // 2), tell=bar.update)
    cluster.table.check()
    watch = cluster.watch
    return {
        "policy": name,
        "workers": workers,
        "requests": requests,
        "served": cluster.served,
        "refused": cluster.refused,
        "reports": watch.count["report"],
        "virtual_s": cluster.now_s,
        "wall_s": time.monotonic() - begun_s,
        "request_us": sum(watch.us(part) * watch.count.get(part, 0) for part in PARTS) / requests,
        "report_us": watch.us("report"),
        "cached": cluster.cached_tokens / (cluster.cached_tokens + cluster.computed),
    }


def change_row(workers: int) -> dict[str, Any]:
    """A worker goes down or comes back, and the next request finds its pool."""
    cluster, watch = Cluster(DEFAULT, workers), Stopwatch()
    table = cluster.table
    policy = LeastLoad(random.Random(SEED).randrange)
    for role in ROLES:
        policy.look(table.ready(role, "", now_s=0.0), RoutingHints())
    for number in range(CHANGES):
        worker, result = table.workers()[number // 2 % workers], (Check.REFUSED, Check.OK)[number % 2]
        begun_ns = time.thread_time_ns()
        table.on_check(worker, result, now_s=0.0)
        for role in ROLES:
            policy.look(table.ready(role, "", now_s=0.0), RoutingHints())
        watch.add("change", begun_ns)
    table.check()
    return {"workers": workers, "change_us": watch.us("change")}


def registry_row(workers: int, calls: int) -> dict[str, Any]:
    """A shared bootstrap server's registry: a room is registered and looked up, and now and then a lease renewed."""
    registry = Registry(BootstrapConfig(max_workers=workers), shared=True)
    gc.collect()  # what the runs before have left is not its affair
    rng, watch = random.Random(SEED), Stopwatch()
    registered = [_registration(i) for i in range(workers)]
    for worker in registered:
        registry.register(worker, 0.0)
    for number in range(1, calls + 1):
        room, worker, now_s = rng.getrandbits(62) + 1, registered[number % workers], number * 1e-4
        begun_ns = time.thread_time_ns()
        registry.expire(now_s)
        registry.register_rooms(worker.incarnation, (room,), now_s)
        registry.look_up(room)
        watch.add("room", begun_ns)
        if number % RENEW_EVERY == 0:
            begun_ns = time.thread_time_ns()
            registry.register(worker, now_s)
            watch.add("renewal", begun_ns)
        if number % ANY_EVERY == 0:
            begun_ns = time.thread_time_ns()
            registry.look_up_any(room + 1, but=(worker.incarnation,))
            watch.add("any", begun_ns)
    registry.check()
    return {"workers": workers, "calls": calls, **{f"{name}_us": watch.us(name) for name in watch.ns}}


def _registration(number: int) -> Registration:
    host = f"10.0.{number >> 8}.{number & 255}"
    return Registration(
        incarnation=f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}",
        control_host=host,
        control_port=8998,
        protocol_version=1,
        page_size=16,
        signature="m",
        dtype="bfloat16",
        url=f"http://{host}:30000",
    )


def idle(few: int, many: int, *, seconds: float) -> dict[str, float]:
    """What one more worker that does nothing costs a whole router: memory, and CPU time of its checks."""
    with one_process_for_all() as port:
        small, large = (measure(count, port=port, seconds=seconds) for count in (few, many))
    more = many - few
    return {
        "workers": many,
        "bytes": (large["bytes"] - small["bytes"]) / more,
        "check_us_per_s": 1e6 * (large["cpu_s_per_s"] - small["cpu_s_per_s"]) / more,
    }


def render(report: dict[str, Any]) -> str:
    """Tables for Markdown."""
    long, *rows = report["router"]
    sizes = sorted({row["workers"] for row in rows})
    lines = [
        f"{long['requests']:,} requests of `{report['trace']}` on {long['workers']:,} workers, {long['policy']}: "
        f"**{long['request_us']:.0f} us of CPU a request**, {long['report_us']:.1f} us for each of {long['reports']:,} checks with their "
        f"reports; {long['served']:,} served, {long['virtual_s'] / 60:.0f} virtual minutes in {long['wall_s'] / 60:.1f}.",
        "",
        "| CPU us a request | " + " | ".join(f"{size:,} workers" for size in sizes) + " |",
        "|---|" + "---:|" * len(sizes),
    ]
    for name in dict.fromkeys(row["policy"] for row in rows):
        found = {row["workers"]: f"{row['request_us']:.0f}" for row in rows if row["policy"] == name}
        cells = [found.get(size, "") for size in sizes]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    changes = [f"{row['change_us']:.0f}" for row in report["changes"]]
    lines.append("| a worker goes down or comes back, and the next choice | " + " | ".join(changes) + " |")
    for key, label in (
        ("room_us", "bootstrap: a room registered and looked up"),
        ("renewal_us", "bootstrap: a lease renewed"),
        ("any_us", "bootstrap: any worker but one"),
    ):
        lines.append(f"| {label} | " + " | ".join(f"{row[key]:.1f}" for row in report["registry"]) + " |")
    found = report["idle"]
    lines += [
        "",
        f"An idle worker takes **{found['bytes'] / 1000:.1f} kB** in a whole router that watches {found['workers']:,} of them "
        f"(its row, metrics, task, timers and kept-alive connection), and {found['check_us_per_s']:.0f} us of CPU a second for its "
        "check and its report.",
    ]
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """CPU time of a request against the number of workers, a line per policy."""
    import matplotlib  # a dev extra; a headless backend before anything else

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = report["router"][1:]
    figure, panel = plt.subplots(figsize=(7.0, 4.6))
    for name in dict.fromkeys(row["policy"] for row in rows):
        mine = [row for row in rows if row["policy"] == name]
        style = "--" if "," in name else "-"
        xs, ys = [row["workers"] for row in mine], [row["request_us"] for row in mine]
        panel.plot(xs, ys, style, marker="o", markersize=3, label=name)
    panel.set(xscale="log", yscale="log", xlabel="workers", ylabel="router core, CPU us a request")
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
