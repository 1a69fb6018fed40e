"""Assembly of the strategy, pipeline and executor of an engine's loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.assembly.parts import EngineParts
from engine.core.dp_agreement import Agreement
from engine.core.dp_step import UpdateAgreement
from engine.core.plan import Phase
from engine.executor.executor import Launch
from engine.flags.resolve import agreement_of
from engine.loop.joint_strategy import JointStrategy
from engine.loop.listeners import LoopListener, StepDurations
from engine.loop.pipeline import MakePipeline, Pipeline, StepStrategy
from engine.pdmux.multiplexing import Multiplexing
from engine.pdmux.phases import lane_share
from engine.ranks.shared_board import SharedBoard


@dataclass(frozen=True, slots=True)
class LoopSteps:
    """Pipeline, strategy listeners, and gauges of device, storage and strategy."""

    pipeline: MakePipeline
    gauges: Callable[[], Mapping[str, float]]
    listeners: Sequence[LoopListener] = ()
    updates: UpdateAgreement | None = None


def loop_steps(parts: EngineParts, *, agreement: Agreement | None = None, depth: int | None = None) -> LoopSteps:
    executor, scheduler = parts.executor, parts.scheduler
    alone = agreement is None and scheduler.limits.pp_size == 1
    assert alone or executor.ended is not None, "a loop that waits for a step does nothing for other ranks"
    gauges: Callable[[], Mapping[str, float]] = executor.runner.expert_gauges
    if parts.storage is not None:
        gauges = partial(_gauges, gauges, parts.storage.gauges)
    listeners: Sequence[LoopListener] = ()
    strategy: StepStrategy = StepStrategy(scheduler) if agreement is None else JointStrategy(scheduler, agreement)
    if parts.config.enable_pdmux:
        share = lane_share(parts.config, parts=parts.device.parts)
        strategy = lanes = Multiplexing(scheduler, share=share, give=parts.device.give)
        listeners = (StepDurations(lanes.note, stages=1, phase=Phase.DECODE), lanes)
        gauges = partial(_gauges, gauges, share.gauges)

    pipeline = partial(
        Pipeline[Launch],
        strategy=strategy,
        executor=executor,
        depth=depth or parts.depth,
        ended=executor.ended,
        streams=len(executor.streams),
    )
    return LoopSteps(pipeline, gauges, listeners)


def joint_steps(parts: EngineParts, dp_rank: int, wakes: Mapping[int, Callable[[], None]]) -> LoopSteps:
    assert parts.group is not None and parts.group.joint is not None
    board = SharedBoard(parts.group.joint.region, rank=dp_rank, wakes=wakes)
    steps = loop_steps(parts, agreement=agreement_of(parts.config, board, dp_rank))
    return replace(steps, updates=UpdateAgreement(board, rank=dp_rank))


def _gauges(*sources: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    return {name: value for source in sources for name, value in source().items()}
