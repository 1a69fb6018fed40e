"""What computes in a worker: model, executor, followers and scheduler, and the memory that peers reach."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from disagg.features.recompute import Bounds
from disagg.metadata import Checksum, MetadataBuffers
from engine.assembly.worker import Computing, computing
from engine.core.plan import Plan
from engine.core.scheduler import Scheduler
from engine.loop.services import LoopServices
from engine.ranks.rank_checksum import alone
from tests.core.hash_model import VOCAB
from tests.core.mem_cache.images import SEES
from tools.simulation.surroundings import Surroundings, kv_args_of, make_scheduler, make_states, make_windows
from tools.simulation.workers.executor import Asked, CheckedModel, SimExecutor
from tools.simulation.workers.group import ALONE, GroupExecutor, Shape, SimGroup, SimRank, own_checksum
from tools.simulation.workers.images import placed_images
from tools.simulation.workers.ranks import Follower, RankModel, Whole
from tools.simulation.world import Process


class Computer:
    """`depth`: of its pipeline, whose ends are `watched` or not. `faulty()`: whether steps may fail now."""

    scheduler: Scheduler
    memory: Whole
    depth: int
    watched = False
    shape = ALONE
    followers: Sequence[Follower] = ()
    group: SimGroup | None = None

    def __init__(
        self, around: Surroundings, process: Process, draw: random.Random, model: CheckedModel, executor: SimExecutor
    ) -> None:
        self.model, self.executor = model, executor
        self.faulty: Callable[[], bool] = lambda: False
        self._around, self._process, self._draw = around, process, draw
        self._failed_seq = -1
        if around.options.step_fail_rate:
            model.fails = self._step_fails

    def _step_fails(self, plan: Plan) -> bool:
        """The same of a plan each time."""
        may_fail = plan.items and plan.seq > self._failed_seq and self.faulty()
        if may_fail and self._draw.random() < self._around.options.step_fail_rate:
            self._failed_seq = plan.seq
            self._around.world.injected["failed step"] += 1
        return plan.seq == self._failed_seq

    def computing(self, services: LoopServices, *, attention: Callable[[], None]) -> Computing:
        executor: Any = self.executor
        if self.group is not None:
            executor = GroupExecutor(executor, self.group, attention=attention if self.watched else None)
        ended = executor.ended if self.watched else None
        return computing(self.scheduler, executor, services, depth=self.depth, ended=ended)

    @property
    def bounds(self) -> Bounds:
        """Limits of requests from peers."""
        return Bounds(VOCAB, context_length=10_000, vision=SEES if self._around.options.image_room else None)

    def checksum(self) -> Checksum | None:
        if not self._around.options.checksum:
            return None
        return alone(own_checksum(self.model, self.shape.held(0))) if self.group is None else self.group.checksum()

    @property
    def models(self) -> list[CheckedModel]:
        """Of all ranks."""
        return [model for rank in range(self.shape.tp) for model in self.models_of(rank)]

    def models_of(self, tp_rank: int) -> list[CheckedModel]:
        """Of a rank and those with the same units at the stages before."""
        if self.group is None:
            return [self.model]
        numbers = range(tp_rank, self.shape.tp * self.shape.pp, self.shape.tp)
        return [self.group.ranks[n].model if n != self.shape.leader else self.model for n in reversed(numbers)]

    def forget(self) -> None:
        """Other weights: what was cached before is gone."""
        if self.group is not None:
            self.group.forget()
        self.model.forget()


class LanguageComputer(Computer):
    """A prefill or decode worker's."""

    def __init__(self, around: Surroundings, process: Process, draw: random.Random, *, decodes: bool) -> None:
        options = around.options
        model = CheckedModel(page_size=options.page_size, name=process.name)
        model.window, model.image_room = options.window, options.image_room
        executor = SimExecutor(model, layers=1 if decodes else options.layers, asked_of=self._asked_of)
        super().__init__(around, process, draw, model, executor)
        states, windows = make_states(options, decodes=decodes), make_windows(options, decodes=decodes)
        num_pages, stages = options.pages[decodes], options.stages[decodes]
        self.shape = Shape(options.ranks[decodes], stages, options.kv_units)
        self.followers = self._start_followers(self.shape.tp * self.shape.pp - 1)
        if self.followers:
            self.group = self.model.ranks = self._start_group(num_pages)
            num_pages = self.group.agree(num_pages + self._draw_of_group.randint(0, 20))
        self.depth, self.watched = options.depth[decodes] + stages - 1, stages > 1
        self.scheduler = make_scheduler(
            options, num_pages=num_pages, draw=draw, decodes=decodes, stages=stages, states=states, windows=windows
        )
        ranks = [process, *self.followers[: self.shape.tp - 1]]
        beside = {"state": states, "window": windows}
        self.memory = Whole(
            ranks,
            kv_args=kv_args_of(
                options, num_pages=num_pages, names=[rank.name for rank in ranks], states=states, windows=windows
            ),
            metadata=MetadataBuffers(options.rows, checksum=self.checksum()),
            models_of=self.models_of,
            allocators={
                "kv": self.scheduler.memory.allocator,
                **{kind: part.allocator for kind, part in beside.items() if part is not None},
            },
            layers=options.layers,
        )

    def _start_followers(self, count: int) -> list[Follower]:
        world, process = self._around.world, self._process
        draw = world.rng(f"followers/{process.name}")
        followers = [Follower(world, process, rank, draw) for rank in range(1, 1 + count)]
        for follower in followers:
            mark = follower.mark("")
            self._around.followers[process.node, mark.pid] = follower
            self._around.network.listen(f"{process.node}:{mark.port}", follower, lambda end: None)
        return followers

    def _start_group(self, num_pages: int) -> SimGroup:
        """Behind the followers of the leader's own stage come those of the stages before it."""
        process, shape = self._process, self.shape
        draw = self._draw_of_group = self._around.world.rng(f"group/{process.name}")
        numbers = [*range(shape.leader + 1, shape.leader + shape.tp), *range(shape.leader)]
        least = draw.choice(numbers)
        ranks = {}
        for number, follower in zip(numbers, self.followers, strict=True):
            of_stage = number > shape.leader
            by_layer = of_stage and self.executor.layers > 1
            model = RankModel(page_size=self.model.page_size, name=follower.name, by_layer=by_layer)
            model.image_room = self.model.image_room
            ranks[number] = SimRank(
                follower,
                model,
                held=shape.held(number),
                ahead=not by_layer and (not of_stage or draw.random() < 0.5),
                pages=num_pages + (0 if number == least else draw.randint(0, 20)),
                draw=draw,
            )
        return SimGroup(process, self.model, ranks, shape=shape, on_end=self._lose_group, draw=draw)

    def _lose_group(self) -> None:
        """As a leader's process ends with its group."""
        self._around.world.seen["workers that lost a rank"] += 1
        self._process.kill()

    def _asked_of(self, slot: int) -> Asked:
        request = next(r for r in self.scheduler.stages.live.values() if r.slot == slot)
        seen = self._around.world.seen
        seen["recomputes with images"] += bool(request.images) and request.rid.startswith("recompute")
        return request.message.namespace, placed_images(request.images)
