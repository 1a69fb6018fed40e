"""Shared memory of DP ranks with DP attention, made by their parent. Never torch."""

import os
from dataclasses import dataclass

from disagg.config import JointSpec
from engine.config import EngineConfig
from engine.parallel.region_plan import RegionPlan, new_memory, new_store


@dataclass(frozen=True, slots=True)
class JointMemory:
    """Memory, an eventfd per scheduler and a rendezvous, inherited by schedulers and followers."""

    plan: RegionPlan
    spec: JointSpec

    @staticmethod
    def create(config: EngineConfig) -> "JointMemory":
        plan = joint_plan(config)
        wakes = tuple(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(config.dp_size))
        return JointMemory(plan, JointSpec(memory=new_memory(plan), wakes=wakes, store=new_store()))

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.spec.memory, *self.spec.wakes, self.spec.store)

    def abort(self) -> None:
        os.pwrite(self.spec.memory, (1).to_bytes(8, "little"), self.plan.abort)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def joint_plan(config: EngineConfig) -> RegionPlan:
    return RegionPlan(ranks=config.tp_size, dp_ranks=config.dp_size)
