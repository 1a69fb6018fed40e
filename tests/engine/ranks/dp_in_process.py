"""The DP ranks of a worker with DP attention in one process: a real engine each, over shared memory, and one thread that turns their loops."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from disagg.processes.joint_memory import joint_plan
from engine.assembly.steps import loop_steps
from engine.config import EngineConfig
from engine.device.step_memory import EngineUse, MakeCapture, MemoryGauge
from engine.flags.resolve import agreement_of
from engine.kernels.build import RanksEnded
from engine.parallel.region import SharedRegion
from engine.ranks.group import Group
from engine.ranks.links import Joint
from engine.ranks.shared_board import SharedBoard
from tests.engine.engine_in_process import EngineInProcess, PartsInProcess
from tests.engine.ranks.ranks_in_process import Ranks, ranks

WITHIN_S = 60.0


class DpEngine(EngineInProcess):
    """One DP rank. `called`: set when its loop is to turn. `turns`: how often it did."""

    def __init__(self, model_path: str, *, group: Group, called: threading.Event, **flags: Any) -> None:
        super().__init__(model_path, group=group, wakeup=called.set, **flags)
        config = self.parts.config
        assert group.joint is not None
        self.rank = rank = group.joint.dp_rank
        others = {other: called.set for other in range(config.dp_size) if other != rank}
        self.board = SharedBoard(group.joint.region, rank=rank, wakes=others)
        agreement = agreement_of(config, self.board, rank)
        steps = loop_steps(self.parts, agreement=agreement)
        self.pipeline = steps.pipeline(self.collect)

    def turn(self) -> bool:
        return PartsInProcess.turn(self)  # others are called while it waits

    @property
    def done(self) -> bool:
        return self.pipeline.num_launched == 0 and (self.paused or self.parts.scheduler.idle)


class DpRanks:
    def __init__(
        self, engines: list[DpEngine], region: SharedRegion, called: threading.Event, errors: list[BaseException]
    ) -> None:
        self.engines = engines
        self.region = region
        self._called = called
        self._errors = errors  # of steps, the first one first

    def run(self) -> None:
        """Turn all until nothing is left to do."""
        while self.turn():
            pass
        for engine in self.engines:
            engine.parts.scheduler.check()

    def turn(self) -> bool:
        """Let each turn once; where none can, wait until one is called. False: all are done."""
        self._called.clear()
        try:
            worked = [engine.turn() for engine in self.engines]
        except RanksEnded:
            raise self._errors[0] from None
        if any(worked):
            return True
        if all(engine.done for engine in self.engines):
            return False
        if not self._called.wait(WITHIN_S):
            raise AssertionError("all rest, and one has work")
        return True


@contextmanager
def dp_ranks(
    model_path: str,
    *,
    tp_size: int,
    dp_size: int,
    use: EngineUse | None = None,
    by_groups: bool = False,
    capture: MakeCapture | None = None,
    gauge: Callable[[], MemoryGauge] | None = None,
    **flags: Any,
) -> Iterator[DpRanks]:
    """As `ranks`: `tp_size` ranks in all."""
    given = {"enable_dp_attention": True, "dp_size": dp_size, **flags}
    config = EngineConfig(model_path=model_path, tp_size=tp_size, **given)
    called = threading.Event()
    with ExitStack() as stack:
        region = SharedRegion.create(joint_plan(config))
        stack.callback(region.close)
        engines, errors = list[DpEngine](), list[BaseException]()
        store = dist.HashStore()

        def started(dp_rank: int) -> AbstractContextManager[Ranks]:
            make: Any = partial(DpEngine, called=called)
            groups: dict[str, Any] = {"by_groups": by_groups and store, "capture": capture, "gauge": gauge}
            one = ranks(
                model_path, tp_size=tp_size, joint=Joint(region, dp_rank), make=make, use=use, **groups, **given
            )
            engine = one.__enter__().engine
            assert isinstance(engine, DpEngine)
            engines.append(engine)
            _end_all_with(engine, region, errors)
            return one

        with ThreadPoolExecutor(dp_size) as pool:  # groups and graphs need all of them
            for one in pool.map(started, range(dp_size)):
                stack.push(one)
        engines.sort(key=lambda engine: engine.rank)
        stack.callback(_let_go, engines)
        yield DpRanks(engines, region, called, errors)


def _end_all_with(engine: DpEngine, region: SharedRegion, errors: list[BaseException]) -> None:
    """A rank whose step raises joins no other: its process would end, and the others with it."""
    executor: Any = engine.parts.executor
    stream = executor.streams[0]._stream
    submit = stream.submit

    def submit_guarded(work: Callable[[], Any]) -> Any:
        def guarded() -> Any:
            try:
                return work()
            except BaseException as error:
                errors.append(error)
                region.abort()
                raise

        return submit(guarded)

    stream.submit = submit_guarded


def _let_go(engines: list[DpEngine]) -> None:
    """Wait for steps that only others had something for."""
    for engine in engines:
        with suppress(RanksEnded):
            engine.parts.device.executor.call(lambda: None)
