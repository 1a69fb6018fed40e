"""What several frontend processes of one worker serve (--tokenizer-worker-num), where they are the bottleneck.

usage: python -m benchmarks.frontends [--frontends N ...] [--seconds S] [--rounds N] [--output FILE]

Chats that are not streamed, over a stand-in for the scheduler that answers each with all its tokens at once. Workers of 1, 2, ...
frontends run side by side and are loaded in turns. The client is one process, the stand-in another: N frontends gain only where
cores are left beside these two.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.router_load import load
from deploy.bench.environment import describe
from deploy.bench.report import table
from disagg.config import DisaggConfig
from disagg.frontend_spec import frontend_spec
from disagg.role_session import RoleSession, plan_session, start_frontend
from engine.config import EngineConfig, ServerConfig
from engine.frontend.server import run_frontend
from engine.frontend.setup import open_worker_gate
from engine.ipc import IpcPaths
from engine.loop.ports import SocketPorts
from engine.messages import (
    FinishReason,
    GenerateRequest,
    SchedulerReady,
    Shutdown,
    TokenBatch,
    TokenOutput,
)
from engine.model_files.model_config import DEFAULT_MODEL_PATH
from service.http.listening import open_shared_ports
from service.process.ready_file import write_ready_file
from service.process.start import die_with_parent
from service.process.stop_signals import StopSignals

OUTPUT_TOKENS = 64
CLIENTS = 64
TOKEN = 300  # of the shipped vocabulary
WARM_UP_S = 0.5
BODY = json.dumps(
    {
        "model": "default",
        "messages": [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 5}],
        "max_tokens": OUTPUT_TOKENS,
    }
).encode()
START_S = 60.0


def stand_in(folder: str, num_frontends: int) -> None:
    """Answer requests of the frontends until `Shutdown`."""
    ports = SocketPorts(IpcPaths(folder), num_frontends=num_frontends)
    ports.to_frontend(SchedulerReady({"max_total_num_tokens": 1 << 20}))
    while True:
        outputs: list[TokenOutput] = []
        for message in ports.receive():
            match message:
                case GenerateRequest(rid=rid):
                    outputs.append(_all_tokens(rid))
                case Shutdown():
                    return
                case _:
                    pass
        if outputs:
            ports.to_frontend(TokenBatch(outputs))
        else:
            ports.wait(1.0)


def _all_tokens(rid: str) -> TokenOutput:
    finish = FinishReason(kind="length")
    return TokenOutput(rid=rid, new_ids=[TOKEN] * OUTPUT_TOKENS, finish=finish, completion_tokens=OUTPUT_TOKENS)


async def serve(num_frontends: int, ready_file: str) -> None:
    """Run a worker's frontends and the stand-in until SIGTERM."""
    server = ServerConfig(
        port=0,
        tokenizer_worker_num=num_frontends,
        log_level="error",
        skip_server_warmup=True,
        drain_timeout_s=0.0,
    )
    engine, disagg = EngineConfig(model_path=DEFAULT_MODEL_PATH, random_seed=0), DisaggConfig()
    plan = plan_session(engine=engine, server=server, disagg=disagg)
    session = RoleSession(plan=plan, ipc=IpcPaths.create())
    args = ["--stand-in", session.ipc.dir, "--frontends", str(num_frontends)]
    signals = StopSignals()
    with open_shared_ports(server.host, 0, count=num_frontends) as ports, signals.caught():
        try:
            session.children.start("stand-in", "benchmarks.frontends", args, num_threads=1)
            for row, port in enumerate(ports[1:], start=1):
                start_frontend(session, row, port)
            await run_frontend(
                frontend_spec(engine, server, disagg, plan.bootstrap_allowlist),
                ipc=session.ipc,
                processes=session.children,
                signals=signals,
                gate=open_worker_gate(server),
                port=ports[0],
                on_ready=lambda: write_ready_file(ready_file, {"url": ports[0].url, "pid": os.getpid()}),
            )
        finally:
            session.children.end()
            session.ipc.remove()


class Worker:
    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        main = psutil.Process(pid)
        self._frontends = [main, *(p for p in main.children() if "disagg.frontend_process" in p.cmdline())]

    def cpu_s(self) -> float:
        """CPU seconds of all frontends so far."""
        return sum(times.user + times.system for times in (p.cpu_times() for p in self._frontends))


@contextmanager
def worker(folder: Path, num_frontends: int) -> Iterator[Worker]:
    ready = folder / f"{num_frontends}.ready"
    command = [sys.executable, "-m", "benchmarks.frontends", "--serve", str(ready), "--frontends", str(num_frontends)]
    process = subprocess.Popen(command, preexec_fn=die_with_parent())
    try:
        deadline_s = time.monotonic() + START_S
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline_s, "the frontends did not start"
            time.sleep(0.02)
        yield Worker(**json.loads(ready.read_text()))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def sample(w: Worker, *, seconds: float) -> dict[str, float]:
    uvloop.run(load(w.url, clients=CLIENTS, seconds=WARM_UP_S, stream=False, body=BODY))
    before_s, start_s = w.cpu_s(), time.monotonic()
    seen = uvloop.run(load(w.url, clients=CLIENTS, seconds=seconds, stream=False, body=BODY))
    taken_s, used_s = time.monotonic() - start_s, w.cpu_s() - before_s
    return {
        "requests_per_s": len(seen.whole_s) / taken_s,
        "tokens_per_s": len(seen.whole_s) * OUTPUT_TOKENS / taken_s,
        "whole_ms": statistics.median(seen.whole_s) * 1e3,
        "cores": used_s / taken_s,
        "cpu_us": used_s / len(seen.whole_s) * 1e6,
    }


def measure(numbers: list[int], *, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Every worker in turns; medians over the rounds."""
    samples: dict[int, list[dict[str, float]]] = {number: [] for number in numbers}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        workers = {number: stack.enter_context(worker(Path(folder), number)) for number in numbers}
        for _ in range(rounds):
            for number, w in workers.items():
                one = sample(w, seconds=seconds)
                samples[number].append(one)
                print(json.dumps({"frontends": number, **one}), file=sys.stderr, flush=True)
    medians = {
        n: {figure: statistics.median(one[figure] for one in samples[n]) for figure in samples[n][0]} for n in numbers
    }
    first = medians[numbers[0]]["requests_per_s"]
    return [{"frontends": n, **medians[n], "over_first": medians[n]["requests_per_s"] / first} for n in numbers]


def render(result: dict[str, Any]) -> str:
    """The table of a result (benchmarks/report.py uses it too)."""
    header = [
        f"frontends; {CLIENTS} clients, chats of {OUTPUT_TOKENS} tokens",
        "requests/s",
        "tokens/s",
        "answer p50, ms",
    ]
    header += ["frontends' CPU, cores", "CPU us a request", "requests/s, over the first row"]
    rows = [
        [
            str(row["frontends"]),
            f"{row['requests_per_s']:.0f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['whole_ms']:.0f}",
            f"{row['cores']:.2f}",
            f"{row['cpu_us']:.0f}",
            f"{row['over_first']:.2f}",
        ]
        for row in result["rows"]
    ]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frontends", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--stand-in", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stand_in:
        return stand_in(args.stand_in, args.frontends[0])
    if args.serve:
        return uvloop.run(serve(args.frontends[0], args.serve))
    result = {
        "environment": describe(),
        "rows": measure(args.frontends, seconds=args.seconds, rounds=args.rounds),
    }
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))
    return None


if __name__ == "__main__":
    main()
