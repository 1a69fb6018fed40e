"""Short versions of the six loads on real processes, on two cores: a prefill and a decode worker behind a router for each route, and two
unified workers behind one.

All workers are up at once and each has one of the cores. The choices take turns, and the routers of the others are stopped meanwhile: each
would read the events of both workers of the pair. No play finds prompts of another in a cache.
"""

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec
import psutil

from benchmarks.cluster import ROOT, START_S, answers, pin_tree, started
from benchmarks.cpu_use import cpu_use
from benchmarks.random_model import write_model
from benchmarks.where.loads import SHORT, Load, headers_of, requests_of
from deploy.bench.stats import RequestRecord
from deploy.openai_api import DONE, SseParser
from planner.executor import TOKEN
from planner.goodput import SloTargets, point_of
from planner.workload import Blocks, PlannedRequest
from service.security.keys import ROUTER_SECRET

KV_TOKENS = 24576  # of a worker
LOWEST_ID, HIGHEST_ID = 16, 500  # of prompts
EVENTS = '{"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}'
ROUTES = ("pair", "decode", "prefill", "auto")
WITHOUT_FETCH = "pair, no fetch"
KNOWING = "auto with objectives"
CHOICES = (*ROUTES, KNOWING, "unified")
BUSY, TTFT, TPOT = (
    0.7,
    6,
    3,
)  # share of the two cores at the offered rate; objectives, in times of what one request takes alone
ANSWERS = 4  # answers that share a step on a busy worker, about
ALONE = ((64, 2), (1024, 2), (64, 33))  # prompt and answer of requests that measure a worker alone
CATCH_UP_S = 0.3  # of a router, with events since it was stopped
TURNS = 3  # of the figure of turns
FIRST, LATER, ANSWER = 768, 48, 64  # their tokens


@dataclass(slots=True)
class Player:
    """Sends requests by `salt`: other ids for another one. `answers`: ids, by index."""

    url: str
    salt: str
    http: aiohttp.ClientSession
    headers: Mapping[str, str] = field(default_factory=dict)
    answers: dict[int, list[int]] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)

    async def play(self, requests: Sequence[PlannedRequest], rate: float) -> list[RequestRecord]:
        begin_s, done = time.perf_counter(), [asyncio.Event() for _ in requests]

        async def one(i: int, request: PlannedRequest) -> RequestRecord:
            await asyncio.sleep(max(0.0, begin_s + request.at / rate - time.perf_counter()))
            if request.after is not None:
                await done[request.after].wait()
            self.prompts[i] = self._prompt(request)
            record = await self.send(i, self.prompts[i], request.output_len)
            done[i].set()
            return record

        return list(await asyncio.gather(*(one(i, request) for i, request in enumerate(requests))))

    def _prompt(self, request: PlannedRequest) -> list[int]:
        """What continues a turn of this play holds the answer that came."""
        if request.after is not None:
            known = [*self.prompts[request.after], *self.answers.get(request.after, ())]
            return known + self._ids(request.blocks)[len(known) :]
        return self._ids(request.blocks)

    def _ids(self, blocks: Blocks) -> list[int]:
        """An answer of no request of this play is made up, and equal in all turns behind it."""
        ids: list[int] = []
        for at, (block, count) in enumerate(blocks):
            name = f"{self.salt} {block} {blocks[at - 1][0] if block == TOKEN else ''}"
            ids += random.Random(name).choices(range(LOWEST_ID, HIGHEST_ID), k=count)
        return ids

    async def send(self, i: int, ids: list[int], output_len: int) -> RequestRecord:
        record = RequestRecord(idx=i, sent_s=0.0, prompt_tokens=len(ids))
        sampling = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        sent_s = last_s = time.perf_counter()
        parser, found = SseParser(), list[int]()
        async with self.http.post(f"{self.url}/generate", json=body, headers=self.headers) as reply:
            if reply.status != 200:
                record.error = f"http {reply.status}: {(await reply.text())[:200]}"
                return record
            async for chunk in reply.content.iter_any():
                now_s = time.perf_counter()
                for data in parser.feed(chunk):
                    event = {} if data == DONE else msgspec.json.decode(data)
                    new = event.get("output_ids", [])[len(found) :]
                    if not new:
                        continue
                    found += new
                    record.cached_tokens = event["meta_info"]["cached_tokens"]
                    if record.ttft_s is None:
                        record.ttft_s = now_s - sent_s
                    else:
                        record.itl_s += [(now_s - last_s) / len(new)] * len(new)
                    last_s = now_s
        record.output_tokens, record.e2e_s = len(found), last_s - sent_s
        self.answers[i] = found
        return record


# ---- processes


@dataclass(frozen=True, slots=True)
class RouterProcess:
    url: str
    process: psutil.Process

    @contextmanager
    def running(self) -> Iterator[str]:
        """Its URL; the process is stopped before and after."""
        self.process.resume()
        try:
            deadline_s = time.monotonic() + START_S
            while not answers(f"{self.url}/health", 200):
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{self.url} is not healthy after {START_S:g} s")
                time.sleep(0.05)
            time.sleep(CATCH_UP_S)
            yield self.url
        finally:
            self.process.suspend()


@contextmanager
def clusters(folder: Path, *, layers: int) -> Iterator[dict[str, RouterProcess]]:
    """Routers by choice, stopped, over one pair and two unified workers."""
    write_model(folder / "model", layers=layers)
    (folder / "secret").write_text("only these processes know it")
    (folder / "secret").chmod(0o600)
    secret = ("--cluster-secret-file", str(folder / "secret"))
    cores = sorted(os.sched_getaffinity(0))[:2]
    common = (
        "--model-path",
        str(folder / "model"),
        "--max-total-tokens",
        str(KV_TOKENS),
        "--num-threads",
        "1",
        *secret,
    )
    with ExitStack() as stack:

        def run(name: str, *args: str) -> tuple[str, psutil.Process]:
            return stack.enter_context(_process(folder / f"{name}.json", *args))

        def worker(name: str, core: int, *args: str) -> str:
            url, process = run(name, "serve", *common, "--kv-events-config", EVENTS, *args)
            pin_tree(process, core)
            return url

        def router(name: str, *args: str) -> RouterProcess:
            url, process = run(f"{name}-router", "router", "--policy", "cache_aware", "--log-level", "error", *args)
            process.suspend()
            stack.callback(process.resume)
            return RouterProcess(url, process)

        pair = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0", "--prefix-fetch")
        prefill = worker("prefill", cores[0], *pair)
        decode = worker("decode", cores[-1], "--disaggregation-mode", "decode", "--prefix-fetch")
        both = [worker(f"unified-{i}", core) for i, core in enumerate((cores[0], cores[-1]))]
        members = ("--prefill", prefill, "--decode", decode)
        found = {route: router(route, *members, "--route", route, *secret) for route in ROUTES}
        found[KNOWING] = router("auto-objectives", *members, "--route", "auto", *secret)
        found["unified"] = router("unified", "--worker-urls", *both, *secret)
        found[WITHOUT_FETCH] = router("no-fetch", *members, "--route", "pair")
        yield found


@contextmanager
def _process(ready: Path, *args: str) -> Iterator[tuple[str, psutil.Process]]:
    argv = [sys.executable, "-m", "deploy", *args, "--port", "0", "--ready-file", str(ready)]
    env = os.environ | {"OMP_NUM_THREADS": "1", ROUTER_SECRET: "benchmarks.where"}
    with started(argv, ready.exists, cwd=ROOT, env=env) as process:
        info = msgspec.json.decode(ready.read_bytes())
        yield info.get("url") or info["router"], psutil.Process(process.pid)


# ---- what is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """One request on one worker, in seconds: of a prompt token, and of a step."""

    token_s: float
    step_s: float

    def objectives(self, requests: Sequence[PlannedRequest]) -> SloTargets:
        mean = sum(one.input_len for one in requests) / len(requests)
        return SloTargets(ttft_s=TTFT * mean * self.token_s, tpot_s=TPOT * self.step_s, itl_s=None, share=0.9)

    def rate(self, requests: Sequence[PlannedRequest]) -> float:
        """A second, so that both cores are busy for `BUSY` of the time if nothing is cached."""
        prompts_s = sum(one.input_len for one in requests) * self.token_s
        return BUSY * 2 * len(requests) / (prompts_s + sum(one.output_len for one in requests) * self.step_s / ANSWERS)


def measure(
    *,
    traces: str,
    layers: int,
    requests: int,
    rounds: int,
    talks: int,
    loads: Sequence[Load] = SHORT,
    tell: Callable[[str], object],
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-where-") as name:
        tell("starting ten processes")
        with clusters(Path(name), layers=layers) as routers, cpu_use() as used:
            found = asyncio.run(_measure(routers, traces, requests, rounds, talks, loads, tell))
    return found | {"cores_left": used.cores_left}


async def _measure(
    routers: Mapping[str, RouterProcess],
    traces: str,
    count: int,
    rounds: int,
    talks: int,
    loads: Sequence[Load],
    tell: Callable[[str], object],
) -> dict[str, Any]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        with routers["unified"].running() as url:
            alone = await _alone(url, http)
        found: dict[str, Any] = {"loads": {}, "turns": await _turns(routers, http, talks, tell) if talks else {}}
        for load in loads:
            _, some = requests_of(load, rate=1.0, traces=traces, count=count, fresh=True)
            rate, slo = alone.rate(some), alone.objectives(some)
            _, some = requests_of(load, rate=rate, traces=traces, count=count, fresh=True)
            records: dict[str, list[RequestRecord]] = {choice: [] for choice in CHOICES}
            for number in range(rounds + 1):
                for choice in CHOICES if number % 2 == 0 else reversed(CHOICES):
                    tell(f"{load.name}, {choice}, round {number}")
                    with routers[choice].running() as url:
                        player = Player(url, f"{load.name} {choice} {number} {time.time()}", http)
                        player.headers = headers_of(slo) if choice == KNOWING else {}
                        played = await player.play(some, rate)
                    records[choice] += played if number else []  # in the first one routers learn
            points = {
                choice: msgspec.to_builtins(point_of(ones, rate=rate, slo=slo, busy={}))
                for choice, ones in records.items()
            }
            found["loads"][load.name] = {"rate": rate, "ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "points": points}
        return found


async def _alone(url: str, http: aiohttp.ClientSession) -> Alone:
    seconds = dict[tuple[int, int], float]()
    for size in ALONE:
        records = [
            await Player(url, f"alone {i}", http).send(0, random.Random(i).choices(range(16, 500), k=size[0]), size[1])
            for i in range(8)
        ]
        seconds[size] = median(one.e2e_s for one in records)
    short, long, answer = (seconds[size] for size in ALONE)
    return Alone(
        token_s=(long - short) / (ALONE[1][0] - ALONE[0][0]), step_s=(answer - short) / (ALONE[2][1] - ALONE[0][1])
    )


async def _turns(
    routers: Mapping[str, RouterProcess], http: aiohttp.ClientSession, talks: int, tell: Callable[[str], object]
) -> dict[str, Any]:
    """TTFT of each turn of conversations, one request at a time, and history tokens that no cache gave."""
    names = (*CHOICES, WITHOUT_FETCH)
    ttfts: dict[str, list[list[float]]] = {name: [[] for _ in range(TURNS)] for name in names}
    again: dict[str, list[int]] = {name: [] for name in names}
    for talk in range(talks + 1):
        for name in names if talk % 2 == 0 else reversed(names):
            tell(f"turns, {name}, conversation {talk}")
            with routers[name].running() as url:
                records = await _talk(Player(url, f"turns {talk} {time.time()}", http))
            if talk == 0:  # warms up
                continue
            for turn, record in enumerate(records):
                if record.ttft_s is None:
                    raise RuntimeError(f"{name}: {record.error}")
                ttfts[name][turn].append(record.ttft_s)
                known = record.prompt_tokens - LATER - 1
                again[name] += [known - record.cached_tokens] if turn else []
    return {
        name: {"ttft_s": [median(of_turn) for of_turn in ttfts[name]], "again": median(again[name])} for name in names
    }


async def _talk(player: Player) -> list[RequestRecord]:
    ids, records = player._ids(((2, FIRST),)), list[RequestRecord]()
    for turn in range(TURNS):
        records.append(await player.send(turn, ids, ANSWER))
        ids = [*ids, *player.answers[turn], *player._ids(((3 + turn, LATER),))]
    return records
