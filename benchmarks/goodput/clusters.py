"""Real clusters under a load: one run at one rate, stopped as soon as too many of its requests have broken their objectives."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.cluster import Cluster, pin, tandem_up
from benchmarks.goodput.layouts import Pinning
from deploy.bench.config import BenchConfig
from deploy.bench.load import run_load
from deploy.bench.run import open_session
from deploy.bench.stats import RequestRecord
from deploy.bench.target import Target
from deploy.bench.workload import BenchRequest
from deploy.openai_api import first_model
from planner.goodput import Point, SloTargets, first_verified, point_of

UNFINISHED = "stopped"  # in flight, or not sent yet, when the run was
WARM_UP, AT_ONCE = 8, 4


@dataclass(slots=True, kw_only=True)
class Watch:
    """Counts the requests that broke their objectives, and says when they are too many of `count`."""

    count: int
    slo: SloTargets
    misses: int = 0

    def is_lost(self, record: RequestRecord) -> bool:
        if record.idx >= first_verified(self.count):
            self.misses += not self.slo.is_met_by(record)
        return self.misses > self.max_misses

    @property
    def max_misses(self) -> int:
        return int((self.count - first_verified(self.count)) * (1 - self.slo.share) + 1e-9)


@contextmanager
def pinned(flags: Sequence[str], where: Pinning) -> Iterator[Cluster]:
    """A cluster whose workers keep to their cores; its router and this process keep to those of the whole cluster."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, where.cores)
    try:
        with tandem_up(*flags) as cluster:
            pin(cluster, {**where.by_role, "router": where.cores})
            yield cluster
    finally:
        os.sched_setaffinity(0, before)


def run(
    url: str, requests: Sequence[BenchRequest], *, rate: float, slo: SloTargets, tell: Callable[[], object]
) -> Point:
    """Send `requests` at their times. `tell`: called as each ends."""
    return asyncio.run(_run(url, requests, rate, slo, tell))


async def _run(
    url: str, requests: Sequence[BenchRequest], rate: float, slo: SloTargets, tell: Callable[[], object]
) -> Point:
    config = BenchConfig(url=url, prompt="ids")
    async with open_session({}) as session:
        target = Target(url, session=session, config=config, model=await first_model(session, url))
        await run_load(target.send, _warm_up(requests), concurrency=AT_ONCE)
        watch, records = Watch(count=len(requests), slo=slo), dict[int, RequestRecord]()
        lost = asyncio.Event()

        def note(record: RequestRecord) -> None:
            records[record.idx] = record
            tell()
            if watch.is_lost(record):
                lost.set()

        await _until(lost, run_load(target.send, requests, concurrency=None, on_done=note))
    return point_of([records.get(one.idx) or _unfinished(one) for one in requests], rate=rate, slo=slo, busy={})


async def _until(lost: asyncio.Event, load: object) -> None:
    """Run `load` to its end, or until `lost` is set: then its requests are ended with their connections."""
    running, watching = asyncio.ensure_future(load), asyncio.ensure_future(lost.wait())  # type: ignore[call-overload]
    await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
    for task in (running, watching):
        task.cancel()
    results = await asyncio.gather(running, watching, return_exceptions=True)
    for error in results:
        if isinstance(error, Exception):
            raise error


def _unfinished(request: BenchRequest) -> RequestRecord:
    return RequestRecord(idx=request.idx, sent_s=request.at_s or 0.0, error=UNFINISHED)


def _warm_up(requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    """Short requests: they open connections, make the first of each batch, and wait until what a stopped run has left is gone."""
    return [
        BenchRequest(idx=-1, prompt=one.prompt[::-1], prompt_len=one.prompt_len, output_len=2)
        for one in requests[:WARM_UP]
    ]
