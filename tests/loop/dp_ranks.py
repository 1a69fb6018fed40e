"""Ranks of DP attention in one thread: the production loop, scheduler and agreement of each, a board, and a device that none has alone.

Whose turn it is and when a step ends is drawn. A rank turns only when something has woken it, so a wake-up that is missing shows as
a rank that sleeps. A step ends when every rank has launched it, so a rank that leaves one out, or takes another one, shows too.
"""

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from engine.assembly.worker import Clock, VirtualPorts
from engine.core.dp_agreement import Agreement, PromptGate
from engine.core.dp_step import AgreedStep, PrefillDelayer, Row, UpdateAgreement
from engine.core.plan import ItemResult, Plan, StepResult
from engine.core.request import Request
from engine.loop.joint_strategy import JointStrategy
from engine.loop.role import UnifiedRole
from engine.messages import ControlReply, TokenBatch, TokenOutput
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import HashModel, next_token, prefix_hash
from tests.grammar.fixed import Fixed
from tests.loop.loop_in_a_test import FakeWeights, loop_of, services_of

LANDS, CONSTRAINED = "lands", "constrained"  # request_id: its KV comes from elsewhere; it has a grammar


class RingBoard:
    """A board as shared memory would hold it: the last rows of each rank, in a ring."""

    def __init__(self, num_ranks: int, *, depth: int) -> None:
        self.num_ranks = num_ranks
        self.wake: list[Any] = [None] * num_ranks
        self._size = 2 * depth + 1
        self._rings: list[list[Row | None]] = [[None] * self._size for _ in range(num_ranks)]
        self._last = [-1] * num_ranks
        self._gate = PromptGate()
        self._votes = [0] * num_ranks

    def post(self, rank: int, row: Row) -> None:
        assert row.step == self._last[rank] + 1, f"rank {rank} posts row {row.step} behind {self._last[rank]}"
        self._rings[rank][row.step % self._size] = row
        self._last[rank] = row.step
        self._wake_others(rank)

    def _wake_others(self, rank: int) -> None:
        for other, wake in enumerate(self.wake):
            if other != rank:
                wake()

    def row(self, rank: int, step: int) -> Row | None:
        row = self._rings[rank][step % self._size]
        assert row is None or row.step <= step, f"row {step} of rank {rank} is overwritten"
        return row if row is not None and row.step == step else None

    def last_step(self, rank: int) -> int:
        return self._last[rank]

    def gate(self) -> PromptGate:
        return self._gate

    def set_gate(self, gate: PromptGate) -> None:
        self._gate = gate

    def vote(self, rank: int, number: int) -> None:
        assert number > self._votes[rank]
        self._votes[rank] = number
        self._wake_others(rank)

    def voted(self, rank: int) -> int:
        return self._votes[rank]


class Role(UnifiedRole):
    """Some requests come with their KV, as on a decode worker; some get a grammar."""

    def __init__(self, engine: EngineInATest, model: HashModel) -> None:
        super().__init__(engine.scheduler)
        self._model = model

    def add(self, request: Request, now_s: float) -> list[TokenOutput]:
        held = self._scheduler.held
        if request.message.request_id == CONSTRAINED:
            request.grammar = Fixed(request.max_new_tokens)
        if request.message.request_id != LANDS:
            return super().add(request, now_s)
        assert held.adopt(request) is None
        if not held.reserve(request):
            held.resume_here(request)
            return []
        self._model.write(request.pages, request.input_ids)
        first = ItemResult(next_token(prefix_hash(request.input_ids)))
        return held.start_decoding(request, first, cached_tokens=0)


@dataclass(eq=False)
class Launched:
    plan: Plan
    sampled: bool
    result: StepResult | None = None


class Rank:
    """Executor of one rank's loop."""

    def __init__(self, group: "Group", rank: int, *, depth: int, delayer: PrefillDelayer | None, **engine: Any) -> None:
        self.engine = EngineInATest(**engine)
        self.model = self.engine.model
        self.rank = rank
        self.awake = True
        self.ports = VirtualPorts(self._on_message, self._wake)
        self.tell = self.ports.deliver
        self.launched: deque[Launched] = deque()  # not computed yet
        self.agreed: dict[int, AgreedStep] = {}  # launched, by their number
        self.turns = 0
        self.paused = False
        self.weights = FakeWeights()
        self.replies: dict[str, ControlReply] = {}
        self._group = group
        group.board.wake[rank] = self._wake
        scheduler, updates = self.engine.scheduler, UpdateAgreement(group.board, rank=rank)
        strategy = JointStrategy(scheduler, Agreement(group.board, rank=rank, delayer=delayer))
        self.loop = loop_of(
            scheduler,
            self,
            self.ports,
            Clock(now_s=lambda: float(self.turns)),
            role=Role(self.engine, self.model),
            services=services_of(weights=self.weights, updates=updates),
            depth=depth,
            strategy=strategy,
            ended=self.ended,
        )

    def turn(self) -> None:
        self.turns += 1
        self.awake = False
        if self.loop.turn():
            self.awake = True
        else:
            self.loop._rest()
        if self.turns % 7 == 0:
            self.engine.scheduler.check()

    # executor

    def launch(self, plan: Plan) -> Launched:
        return self._launch(plan, sampled=True)

    def launch_forward(self, plan: Plan) -> Launched:
        return self._launch(plan, sampled=False)

    def _launch(self, plan: Plan, *, sampled: bool) -> Launched:
        if plan.agreed is None:
            assert not plan.items, "a step without the other ranks"
        else:
            self._group.check(self.rank, plan, plan.agreed, weights=self.weights.model_path)
            self.agreed[plan.agreed.step] = plan.agreed
        self.launched.append(Launched(plan, sampled))
        return self.launched[-1]

    def launch_sampling(self, launched: Launched) -> None:
        launched.sampled = True

    def compute(self) -> bool:
        """Compute the oldest step, if all ranks have launched it and its masks are here."""
        if not self.launched or not self.launched[0].sampled:
            return False
        launched = self.launched[0]
        if launched.plan.agreed is not None and not self._group.all_have(launched.plan.agreed.step):
            return False
        launched.result = self.model.run(self.launched.popleft().plan)
        self._wake()
        return True

    def ended(self, launched: Launched) -> bool:
        return launched.result is not None

    def collect(self, launched: Launched) -> StepResult:
        assert launched.result is not None, "the loop waits for a step"
        return launched.result

    def _on_message(self, message: Any) -> None:
        if isinstance(message, TokenBatch):
            self.engine.say(message.outputs)
        if isinstance(message, ControlReply):
            self.replies[message.call_id] = message

    def _wake(self) -> None:
        self.awake = True


class Group:
    def __init__(
        self,
        num_ranks: int,
        *,
        depth: int = 2,
        draw: random.Random,
        delayer: PrefillDelayer | None = None,
        **engine: Any,
    ) -> None:
        self.board = RingBoard(num_ranks, depth=depth)
        self.draw = draw
        self.ranks = [
            Rank(self, rank, depth=depth, delayer=delayer if rank == 0 else None, **engine) for rank in range(num_ranks)
        ]
        self.steps = 0
        self._weights: dict[int, str] = {}  # by step

    def check(self, rank: int, plan: Plan, agreed: AgreedStep, *, weights: str) -> None:
        """Every rank has the same step, the next one, its own count in it, and the same weights."""
        if any(agreed.tokens):
            assert self._weights.setdefault(agreed.step, weights) == weights, "two ranks compute with different weights"
        assert agreed.step == max(self.ranks[rank].agreed, default=-1) + 1
        self.steps = max(self.steps, agreed.step + 1)
        for other in self.ranks:
            assert other.agreed.get(agreed.step, agreed) == agreed, "two ranks compute different steps"
            other.agreed.pop(agreed.step - 64, None)
        num_tokens = sum(item.q_len for item in plan.items)
        assert num_tokens == agreed.tokens[rank] or (
            agreed.padding.name == "MAX_LEN" and num_tokens <= agreed.tokens[rank]
        )
        assert not (plan.extend and agreed.graph)

    def all_have(self, step: int) -> bool:
        return all(max(rank.agreed, default=-1) >= step for rank in self.ranks)

    def move(self) -> bool:
        """Something that can happen: a rank that is awake turns, or a step is computed. False: nothing can."""
        ranks = self.draw.sample(self.ranks, len(self.ranks))
        if self.draw.random() < 0.5 and any(rank.compute() for rank in ranks):
            return True
        awake = [rank for rank in ranks if rank.awake]
        if awake:
            awake[0].turn()
            return True
        return any(rank.compute() for rank in ranks)

    def rest(self) -> None:
        """Until nothing moves."""
        while self.move():
            pass
