"""Schedules requests: closed loop, open loop, or two targets in turns."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace

from msgspec import structs

from deploy.bench.config import CONCURRENCY
from deploy.bench.stats import RequestRecord, Summary, summarize
from deploy.bench.workload import BenchRequest

Send = Callable[..., Awaitable[RequestRecord]]  # (request, *, started_at) -> Record
OnDone = Callable[[RequestRecord], None]
One = Callable[[BenchRequest], Coroutine[None, None, None]]


@dataclass
class Measured:
    """A target's records, and its seconds under load."""

    records: list[RequestRecord] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def summary(self) -> Summary:
        return summarize(self.records, duration_s=self.duration_s)


async def run_load(
    send: Send, requests: Sequence[BenchRequest], *, concurrency: int | None, on_done: OnDone = lambda record: None
) -> Measured:
    """Without times `concurrency` are sent at once; with times it is a limit."""
    started_at = time.perf_counter()
    measured = Measured()

    async def one(request: BenchRequest) -> None:
        record = await send(request, started_at=started_at)
        measured.records.append(record)
        on_done(record)

    if requests and requests[0].at_s is not None:
        await _open_loop(one, requests, started_at=started_at, concurrency=concurrency)
    else:
        await _closed_loop(one, requests, concurrency=concurrency or CONCURRENCY)
    measured.duration_s = time.perf_counter() - started_at
    return measured


async def run_in_turns(
    sends: Sequence[Send], requests: Sequence[BenchRequest], *, rounds: int, concurrency: int | None, on_done: OnDone
) -> list[Measured]:
    """Put equal shares of the requests on each target in turn.

    That cancels drift (heat, neighbours); the order alternates. Times count from the run's start.
    """
    started_at = time.perf_counter()
    totals = [Measured() for _ in sends]
    for number, share in enumerate(shares(requests, rounds)):
        order = list(range(len(sends)))
        for target in order if number % 2 == 0 else reversed(order):
            turn_s = time.perf_counter() - started_at
            part = await run_load(sends[target], share, concurrency=concurrency, on_done=on_done)
            totals[target].records += [structs.replace(one, sent_s=one.sent_s + turn_s) for one in part.records]
            totals[target].duration_s += part.duration_s
    return totals


def shares(requests: Sequence[BenchRequest], rounds: int) -> list[list[BenchRequest]]:
    """Cut into nearly equal parts with times from 0."""
    bounds = [len(requests) * i // rounds for i in range(rounds + 1)]
    return [_restarted(requests[a:b]) for a, b in itertools.pairwise(bounds) if a < b]


def _restarted(requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    first = requests[0].at_s
    return [r if r.at_s is None or first is None else replace(r, at_s=r.at_s - first) for r in requests]


async def _closed_loop(one: One, requests: Sequence[BenchRequest], *, concurrency: int) -> None:
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            await one(request)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(client())


async def _open_loop(one: One, requests: Sequence[BenchRequest], *, started_at: float, concurrency: int | None) -> None:
    places: AbstractAsyncContextManager[object] = (
        nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
    )

    async def limited(request: BenchRequest) -> None:
        async with places:
            await one(request)

    async with asyncio.TaskGroup() as group:
        for request in requests:
            delay_s = started_at + (request.at_s or 0.0) - time.perf_counter()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            group.create_task(limited(request))
