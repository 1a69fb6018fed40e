"""The KV events of many workers through one router process: at which rate what breaks.

usage: python -m benchmarks.kv_event_rate [--workers N] [--rates R ...] [--tokens N] [--seconds S] [--output FILE]

Publishers in a few processes speak the real wire (service/kv_events.py over ZMQ): each worker has its own address of 127.0.0.0/8, its PUB
and its replay socket. A message stores the pages of one prompt, and removes those of an older one, as at a worker whose cache is full:
so a rate of messages is a rate of requests. Prompts are of one worker alone. Blocks are named as our workers name them, or by hashes of
another engine, which the router has to read the tokens for. The router's own feed and prefix index read them, in a process of their own,
while a timer of the same event loop notices how late it is called. "behind": what was sent and not applied at the end, in seconds of the rate.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
import zmq

from benchmarks.scale_idle import address
from deploy.bench.environment import describe
from deploy.launcher.ports import free_ports
from router.choice.chooser import make_chooser
from router.choice.kv_feed import KVEventFeed
from router.config import ChoiceFlags
from router.pool.states import Check
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable
from service.kv_events import END_SEQ, BlockHash, BlockRemoved, BlockStored, KVEventBatch, encode_batch, seq_bytes
from service.prefix_chain import VERSION, open_chain, page_names, token_seed
from service.process.start import allow_many_files

WORKERS = 1000
RATES = (500, 1000, 2000, 4000, 8000, 10_000)
PAGE = 16  # tokens
PROMPTS = 16  # that repeat; each is there for half of them
PUBLISHERS = 2
LAG_S = 0.01  # between two looks at the loop's lag
SETTLE_S = 180.0
BROKEN_S = 1.0  # behind
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Cycles:
    """What workers publish. `tokens`: of a prompt. `named`: blocks have our names."""

    tokens: int
    named: bool


def messages(worker: int, tokens: int, *, named: bool) -> list[bytes]:
    """The cycle of batches that a worker publishes, from the second round on: what is removed was stored before."""
    prompts = [_prompt(worker * PROMPTS + number, tokens) for number in range(PROMPTS)]
    link = open_chain(token_seed())
    if named:
        hashes = [[name for name, _ in page_names(link, (), ids, PAGE)] for ids in prompts]
    else:
        hashes = [[hash((worker, number, at)) for at in range(0, len(ids), PAGE)] for number, ids in enumerate(prompts)]
    batches = []
    for number, ids in enumerate(prompts):
        stored = BlockStored(list[BlockHash](hashes[number]), None, ids, PAGE, None)
        gone = BlockRemoved(list[BlockHash](hashes[(number - PROMPTS // 2) % PROMPTS]))
        batches.append(encode_batch(KVEventBatch(0.0, [gone, stored])))
    return batches


def _prompt(number: int, tokens: int) -> list[int]:
    return [(number * 7919 + i * 31) % 128_000 for i in range(tokens // PAGE * PAGE)]


def publish(workers: Sequence[int], ports: tuple[int, int], cycles: Cycles, commands: Any, sent: Any) -> None:
    """Publish for these workers at the rates that come by `commands`: (messages a second of all, seconds)."""
    allow_many_files()
    own = [messages(worker, cycles.tokens, named=cycles.named) for worker in workers]
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 65536)
    pubs, readable = [], zmq.Poller()
    for worker in workers:
        pub, replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)  # an XPUB socket tells who subscribes
        pub.setsockopt(zmq.SNDHWM, 100_000)
        pub.bind(f"tcp://{address(worker)}:{ports[0]}")
        replay.bind(f"tcp://{address(worker)}:{ports[1]}")
        for one in (pub, replay):
            readable.register(one, zmq.POLLIN)
        pubs.append(pub)
    number = len(pubs)  # of the next message; the first of each worker answers its subscriber
    sent.put(0)
    while True:
        if not commands.poll(0.0):
            for one, _ in readable.poll(20):
                _answer(one)
            continue
        rate, seconds = commands.recv()
        if not rate:
            return
        begun_s, count = time.monotonic(), 0
        while (elapsed_s := time.monotonic() - begun_s) < seconds:
            while count < elapsed_s * rate:
                turn, place = divmod(number, len(pubs))
                pubs[place].send_multipart([b"", seq_bytes(turn), own[place][turn % PROMPTS]])
                number += 1
                count += 1
            time.sleep(0.001)
        sent.put(count)


def _answer(one: Any) -> None:
    """Greet a subscriber with an empty batch. To replay there is nothing: what is missing is lost."""
    if one.getsockopt(zmq.TYPE) == zmq.XPUB:
        one.recv()
        one.send_multipart([b"", seq_bytes(0), encode_batch(KVEventBatch(0.0, []))])
    else:
        client = one.recv_multipart()[0]
        one.send_multipart([client, b"", END_SEQ, b""])


async def read(
    workers: int, ports: tuple[int, int], cycles: Cycles, rates: Sequence[int], seconds: float, lines: Any
) -> None:
    """The router's side. Says "ready", then for each "go" from stdin what came in `seconds`, and how long the rest took."""
    chooser = make_chooser(ChoiceFlags(policy="cache_aware"), draw=lambda n: 0)
    table, feed = WorkerTable(), KVEventFeed(chooser=chooser, secret=None)
    endpoints = {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}", "topic": ""}
    for number in range(workers):
        worker = table.add(f"http://{address(number)}:1", role=Role.PREFILL)
        table.on_check(worker, Check.OK, now_s=0.0)
        feed.on_info(worker, {"kv_events_config": {**endpoints, "prefix_names": VERSION if cycles.named else None}})
    known = table.workers()
    while _applied(feed, known) < workers:  # each has greeted
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    before = workers
    for _ in rates:
        await asyncio.to_thread(lines.readline)
        found = await _measure(feed, known, seconds, before)
        before += int(found["applied_in_the_end"])
        print(json.dumps(found), flush=True)
    await feed.close()


async def _measure(feed: KVEventFeed, workers: list[Worker], seconds: float, before: int) -> dict[str, float]:
    lags: list[float] = []
    ticker = asyncio.create_task(_lags(lags))
    cpu_s, begun_s = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    wall_s = time.monotonic() - begun_s
    applied, used_s = _applied(feed, workers) - before, time.process_time() - cpu_s
    ticker.cancel()
    last, now = -1, applied
    while now != last:  # until nothing comes any more
        await asyncio.sleep(2.0)
        last, now = now, _applied(feed, workers) - before
    views = [feed.view_of(worker) for worker in workers]
    return {
        "applied": applied,
        "applied_in_the_end": now,
        "applied_per_s": applied / wall_s,
        "cores": used_s / wall_s,
        "us_per_message": 1e6 * used_s / max(1, applied),
        "lag_p50_ms": 1e3 * statistics.median(lags),
        "lag_p99_ms": 1e3 * sorted(lags)[int(0.99 * (len(lags) - 1))],
        "gaps": sum(view.num_gaps for view in views if view is not None),
        "files": len(os.listdir("/proc/self/fd")),
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _applied(feed: KVEventFeed, workers: list[Worker]) -> int:
    views = [feed.view_of(worker) for worker in workers]
    return sum(view.num_messages for view in views if view is not None)


async def _lags(lags: list[float]) -> None:
    while True:
        due_s = time.monotonic() + LAG_S
        await asyncio.sleep(LAG_S)
        lags.append(max(0.0, time.monotonic() - due_s))


def measure(workers: int, rates: Sequence[int], cycles: Cycles, *, seconds: float) -> list[dict[str, Any]]:
    """A row for each rate."""
    ports = tuple(free_ports(2))
    context, rows = multiprocessing.get_context("spawn"), []
    counts, pipes, processes = context.Queue(), [], []
    for place in range(PUBLISHERS):
        mine, theirs = context.Pipe()
        arguments = (range(place, workers, PUBLISHERS), ports, cycles, theirs, counts)
        processes.append(context.Process(target=publish, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(mine)
    argv = [sys.executable, "-m", "benchmarks.kv_event_rate", "--read", str(ports[0]), str(ports[1])]
    argv += ["--workers", str(workers), "--seconds", str(seconds), "--rates", *map(str, rates)]
    argv += [] if cycles.named else ["--foreign"]
    router = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert router.stdin is not None and router.stdout is not None
    try:
        for _ in pipes:
            counts.get(timeout=SETTLE_S)
        assert router.stdout.readline() == "ready\n", "the router's side did not start"
        for rate in rates:
            for pipe in pipes:
                pipe.send((rate / PUBLISHERS, seconds))
            router.stdin.write("go\n")
            router.stdin.flush()
            found = json.loads(router.stdout.readline())
            sent = sum(counts.get(timeout=SETTLE_S) for _ in pipes)
            behind_s = max(0.0, (sent - found["applied"]) / rate)
            lost = sent - found["applied_in_the_end"]
            rows.append(
                {
                    "named": cycles.named,
                    "rate": rate,
                    "sent": sent,
                    "behind_s": behind_s,
                    "lost": lost,
                    "load": os.getloadavg()[0],
                    **found,
                }
            )
            print(rows[-1], file=sys.stderr)
            if behind_s > BROKEN_S:
                break  # more breaks it further
    finally:
        router.kill()
        router.wait()
        for process in processes:
            process.kill()
            process.join()
    return rows


def render(result: dict[str, Any]) -> str:
    """Write the table of docs/reports/benchmarks.md."""
    lines = [
        "| blocks named by | messages/s | applied/s | behind after the run, s | lost | cores | CPU us each | loop's lag p99, ms | open files | MiB | machine's load |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {'our workers' if row['named'] else 'other engines'} | {row['rate']:,} | {row['applied_per_s']:,.0f} | {row['behind_s']:.1f} | {row['lost']:,} | {row['cores']:.2f} | "
            f"{row['us_per_message']:.0f} | {row['lag_p99_ms']:.0f} | {row['files']:,} | {row['max_rss_mib']:.0f} | {row['load']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--rates", type=int, nargs="+", default=RATES, help="messages a second of all workers together")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt that no cache has")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--read", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--foreign", action="store_true", help="only blocks that another engine names")
    args = parser.parse_args()
    allow_many_files()
    if args.read:
        cycles = Cycles(args.tokens, named=not args.foreign)
        uvloop.run(read(args.workers, tuple(args.read), cycles, args.rates, args.seconds, sys.stdin))
        return
    rows = []
    for named in (False,) if args.foreign else (True, False):
        rows += measure(args.workers, args.rates, Cycles(args.tokens, named), seconds=args.seconds)
    result = {"environment": describe(), "workers": args.workers, "tokens": args.tokens, "rows": rows}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
