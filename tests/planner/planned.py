"""Small planned clusters for tests: a model of 1 MB a KV page, workers with round step times."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tqdm import tqdm

from engine.config import EngineConfig
from planner.cluster import ClusterCosts, ClusterLayout, PlannedCluster, parse_layout
from planner.config import PlanConfig
from planner.goodput import Point
from planner.step_time import Fitted
from planner.study import study_of, try_rate
from planner.worker import WorkerSpec
from planner.workload import PlannedRequest

PAGE_SIZE, PAGE_BYTES = 16, 1 << 20
LINK = 1 << 30  # bytes a second: a page takes 1/1024 s
STEP_TIME = Fitted(
    prefill_step_s=0.002,
    prefill_token_s=0.0001,
    prefill_pair_s=1e-8,
    decode_step_s=0.002,
    decode_request_s=0.0005,
    decode_context_s=1e-7,
)
CONTROL_S, LATENCY_S, OUTSIDE_S = 0.001, 0.003, 0.01


def cluster(name: str, *, max_running: int = 64, link: float = LINK, **given: Any) -> PlannedCluster:
    """What a worker's spec has no field for is a cost of the cluster."""
    own = {one.name for one in fields(WorkerSpec)}
    costs = {name: given.pop(name) for name in list(given) if name not in own}
    spec = {"num_pages": 4096, "step_time": STEP_TIME, **given}
    layout: ClusterLayout = parse_layout(name)
    costs.setdefault("route", "auto" if layout.prefill and layout.unified else "pair")
    engine = EngineConfig(
        device="cuda",
        stream="cuda",
        disable_overlap_schedule=True,
        page_size=PAGE_SIZE,
        chunked_prefill_size=2048,
        max_prefill_tokens=16384,
        context_length=100_000,
        max_running_requests=max_running,
        enable_mixed_chunk=layout.mixed,
    )
    workers = {
        role: WorkerSpec(
            role=role,
            engine=engine,
            page_bytes=PAGE_BYTES,
            link_bytes_per_s=link,
            **spec,  # type: ignore[arg-type]
        )
        for role in layout.roles
    }
    costs = ClusterCosts(
        control_s=CONTROL_S,
        latency_s=LATENCY_S,
        outside_s=OUTSIDE_S,
        **costs,
    )
    return PlannedCluster(layout, workers, costs)


def request_at(at: float, input_len: int, output_len: int, *, block: int = 0) -> PlannedRequest:
    """`block`: requests of one block share their prefix."""
    return PlannedRequest(at=at, blocks=((block + 2, input_len),), output_len=output_len)


def prefill_s(tokens: int, *, after: int = 0) -> float:
    """Of a chunk behind `after` tokens."""
    t = STEP_TIME
    return t.prefill_step_s + tokens * t.prefill_token_s + tokens * (after + (tokens + 1) / 2) * t.prefill_pair_s


def decode_s(*contexts: int) -> float:
    t = STEP_TIME
    return t.decode_step_s + len(contexts) * t.decode_request_s + sum(contexts) * t.decode_context_s


def assert_at_rest(planned: PlannedCluster) -> None:
    """Every owner agrees with itself, and nobody holds anything but cached prefixes."""
    for worker in planned.workers:
        worker.scheduler.check()
        worker.role.check()
        assert not worker.role.waits_for_outside()
        assert worker.scheduler.idle and worker.scheduler.memory.allocator.counts()["held"] == 0


@contextmanager
def runs_here(config: PlanConfig, *, jobs: int) -> Iterator[SimpleNamespace]:
    """In the place of `RunPool`, whose processes import for half a second."""
    study = study_of(replace(config, save_profile=None))

    def submit(layout: ClusterLayout, rate: float) -> "Future[Point]":
        done: Future[Point] = Future()
        done.set_result(try_rate(study, layout, rate))
        return done

    yield SimpleNamespace(submit=submit, bar=tqdm(disable=True))


def in_process(test: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test whose plans run here."""
    for module in ("planner.run", "planner.smallest"):
        test = patch(f"{module}.RunPool", runs_here)(test)
    return test
