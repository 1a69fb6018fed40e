"""The followers of a simulated worker: the leader's and the followers' own code, over channels in virtual time.

    leader    Executor(SimExecutor, Followers) --steps--> channel --> Follower(RankRunner over ranks.py)    follower

A message arrives after a lag of its own, in order. A step with items is a sum over all ranks: the leader's part of it waits for every
follower, which has run whatever came before by then. Some followers run it sooner (another stage always may), and copies
alone run at any time. The tokens of a step are right only if every rank has the same prefix for each item.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.core.plan import Plan, StepResult
from engine.executor.executor import Executor
from engine.kv.cache_spec import KVShard
from engine.ranks.follower import Follower, LostStep, RankRunner
from engine.ranks.followers import Followers, GroupEnded, Take
from engine.ranks.messages import Failed, PoolSize, Ready, Serving, Step, ToFollower, ToLeader
from engine.ranks.rank_checksum import GroupChecksum, OwnChecksum, Parts, Tail
from tests.core.hash_model import next_token
from tools.simulation.workers.executor import CheckedModel, SimExecutor
from tools.simulation.workers.ranks import (
    FollowedTokens,
    RankModel,
    SampledTokens,
    SimCopies,
    SimForward,
    SimWeightsOfRank,
    page_sum,
)
from tools.simulation.world import Process, Violation

MODEL_LAYERS = 2  # as a checksum counts them, and stages divide them
FILES = "simulated"  # fingerprint of the weights
LAG_S = (0.00002, 0.002)
SLOW_S = 0.2  # now and then a message waits so long for its follower
END_S = (0.0005, 0.2)  # until the leader learns that a follower has ended
_to_follower: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToFollower)  # type: ignore[arg-type]
_to_leader: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToLeader)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Shape:
    """Ranks of a worker, numbered stage by stage; the leader is the first of the last stage. `units`: of the model's KV."""

    tp: int
    pp: int
    units: int

    @property
    def leader(self) -> int:
        return self.tp * (self.pp - 1)

    def held(self, rank: int) -> KVShard:
        stage, tp_rank = divmod(rank, self.tp)
        first, count = tp_rank * self.units // self.tp, max(1, self.units // self.tp)
        layers = range(stage * MODEL_LAYERS // self.pp, (stage + 1) * MODEL_LAYERS // self.pp)
        return KVShard(range(first, first + count), self.units, layers, MODEL_LAYERS)


ALONE = Shape(1, 1, 1)


class SimRank:
    """One follower. `ahead`: it may run a step with items before the leader does. `pages`: that its memory holds."""

    def __init__(
        self, process: Process, model: RankModel, *, held: KVShard, ahead: bool, pages: int, draw: random.Random
    ) -> None:
        self.process, self.model, self.held = process, model, held
        self.inbox: deque[bytes] = deque()
        self.outbox: deque[bytes] = deque()
        self.on_reply: Callable[[], None] = lambda: None
        self._ahead = ahead
        self._pages = pages
        self._draw = draw
        self._follower: Follower | None = None

    @property
    def name(self) -> str:
        return self.process.name

    def ended(self) -> str:
        return "ended: SIGKILL"

    def start(self, tokens: SampledTokens) -> None:
        """As engine/assembly/follower.py."""
        weights: Any = SimWeightsOfRank()
        self.tokens = FollowedTokens(tokens)
        self.copies, self.forward = SimCopies(self.model), SimForward(self.model, self.tokens)
        parts: dict[str, Any] = {"copies": self.copies, "forward_pass": self.forward, "future_map": self.tokens}
        is_last = self.held.layers.stop == self.held.num_layers
        self._runner = RankRunner(model=weights, **parts, after=None if is_last else weights)
        self.send(Ready(self._pages, FILES))

    # ---- its ends of the channel

    def receive_later(self, data: bytes) -> None:
        if not self.process.alive:
            return
        self.inbox.append(data)
        lag_s = SLOW_S if self._draw.random() < 0.02 else LAG_S[1]
        self.process.after(self._draw.uniform(LAG_S[0], lag_s), "step arrives", self._turn)

    def send(self, message: ToLeader) -> None:
        self.outbox.append(msgspec.msgpack.encode(message))
        self.on_reply()

    # ---- its loop

    def _turn(self) -> None:
        while self.inbox and self._may_begin(self.inbox[0]):
            self.handle()

    def _may_begin(self, data: bytes) -> bool:
        message = _to_follower.decode(data)
        if not isinstance(message, Step) or not message.slots:
            return True
        return self._ahead and (self.tokens.there or min(message.tokens) >= 0)

    def handle(self) -> None:
        """The next message."""
        message = _to_follower.decode(self.inbox.popleft())
        if isinstance(message, PoolSize):
            self.model.num_pages = min(message.num_pages, self._pages)
            self._serve()
            return
        assert self._follower is not None
        try:
            self._follower.handle(message)
        except LostStep as error:
            self.send(Failed(str(error), refused=False))

    def _serve(self) -> None:
        end: Any = self
        actions: dict[str, Callable[..., Any]] = {
            "use_weights": self.model.forget,
            "forget": lambda: None,
            "checksum": lambda pages, tail, num_tokens: {
                self.held.name: page_sum(self.model, self.held, pages, num_tokens)
            },
        }
        self._follower = Follower(end, self._runner, readers={}, actions=actions, turning=lambda _: None)
        self.send(Serving())


@dataclass
class _ToRank:
    """The leader's end of a channel."""

    rank: SimRank

    def send(self, message: Any) -> None:
        self.rank.receive_later(msgspec.msgpack.encode(message))

    def shut(self) -> None:
        """Both processes end with the worker."""

    def close(self) -> None:
        """Nothing is left open."""


class VirtualMail:
    """engine/ranks/followers.py's `Mail`: answers arrive by events, and at once where the leader waits for them."""

    def __init__(self, group: "SimGroup") -> None:
        self._group = group
        self.take: Take = lambda rank, message: True

    def start(self, take: Take, tick: Callable[[], None]) -> None:
        self.take = take

    def wait_for(self, there: Callable[[], bool], timeout_s: float | None) -> bool:
        while not there():
            if not self._group.progress():
                raise Violation(f"{self._group.process.name} waits for its followers, which have nothing to do")
        return True

    def notify(self) -> None:
        """It has seen it."""

    def close(self) -> None:
        """Nothing to end."""


class SimGroup:
    """`ranks`: the followers by rank. `on_end`: the worker ends, as it does when it has lost a rank."""

    def __init__(
        self,
        process: Process,
        own: CheckedModel,
        ranks: dict[int, SimRank],
        *,
        shape: Shape,
        on_end: Callable[[], None],
        draw: random.Random,
    ) -> None:
        self.process, self.ranks = process, ranks
        self._own, self._shape = own, shape
        self._on_end = on_end
        self._draw = draw
        self._tokens = SampledTokens()
        self._reported: set[int] = set()  # ranks whose end the leader knows
        self._mail = VirtualMail(self)
        members: Any = {number: (_ToRank(rank), rank) for number, rank in ranks.items()}
        self.followers = Followers(members, on_end=self._end, mail=self._mail, num_first=shape.tp)
        for number, rank in ranks.items():
            rank.start(self._tokens)
            rank.on_reply = lambda number=number: self._reply_later(number)  # type: ignore[misc]
            rank.process.on_death.append(lambda number=number: self._note_death(number))  # type: ignore[misc]

    def agree(self, num_pages: int) -> int:
        """As engine/assembly/memory.py: what every rank allocates."""
        agreed = min(num_pages, self.followers.await_ready(fingerprint=FILES, timeout_s=1.0).num_pages)
        self.followers.place(PoolSize(agreed))
        self.followers.await_serving(timeout_s=1.0)
        return agreed

    def checksum(self) -> GroupChecksum:
        """As disagg/compose.py."""
        own = own_checksum(self._own, self._shape.held(self._shape.leader))
        return GroupChecksum(own, self.followers)

    def forget(self) -> None:
        """Other weights on every rank: what was cached before is gone."""
        self.followers.apply("use_weights").wait()

    # ---- steps of all ranks

    def join(self, plan: Plan) -> None:
        """Let every follower come to the sums of a step with items. Raises GroupEnded where one has died."""
        for number, rank in self.ranks.items():
            while plan.seq not in rank.forward.partials:
                if not rank.process.alive:
                    self._report(number)
                    raise GroupEnded(f"{rank.name} has ended")
                if not rank.inbox:
                    raise Violation(f"{rank.name} has no step {plan.seq}: its sums wait for ever")
                rank.handle()
                self._deliver(number)

    def add_up(self, plan: Plan, result: StepResult) -> None:
        """Make the tokens of what all ranks have computed, not of the leader's part alone; publish them."""
        partials = [rank.forward.partials.pop(plan.seq) for rank in self.ranks.values()]
        for i, (item, sampled) in enumerate(zip(plan.items, result.items, strict=True)):
            own = self._own.value_behind(item) + self._own.num_forgotten
            theirs = [partial[i] for partial in partials]
            if sampled.token is not None and any(value != own for value in theirs):
                sampled.token = self._own.last[item.slot] = next_token(own + sum(theirs))
        if any(item.sample for item in plan.items):
            self._tokens.publish(self._own.last)
        for rank in self.ranks.values():
            rank.process.after(self._draw.uniform(*LAG_S), "tokens arrive", rank._turn)

    def end_layer(self, num_layers: int) -> None:
        for rank in self.ranks.values():
            rank.model.end_layer(num_layers)

    def check_collected(self, plan: Plan) -> None:
        """What the leader has collected may be reused: no rank has it still to do."""
        if not plan.items and not plan.copies_pages:
            return
        for rank in self.ranks.values():
            if rank.copies.made < plan.seq:
                raise Violation(
                    f"step {plan.seq} is collected, and {rank.name} has made the copies of {rank.copies.made}"
                )

    # ---- answers

    def progress(self) -> bool:
        """Let each follower handle one message, and the leader take what has come; False: there is nothing."""
        moved = False
        for number, rank in self.ranks.items():
            if rank.process.alive and rank.inbox and rank._may_begin(rank.inbox[0]):
                rank.handle()
                moved = True
            moved = self._deliver(number) or moved
            if not rank.process.alive:
                moved = self._report(number) or moved
        return moved

    def _reply_later(self, number: int) -> None:
        self.process.after(self._draw.uniform(*LAG_S), "answer arrives", self._deliver, number)

    def _deliver(self, number: int) -> bool:
        outbox = self.ranks[number].outbox
        found = bool(outbox)
        while outbox:
            self._mail.take(number, _to_leader.decode(outbox.popleft()))
        return found

    def _note_death(self, number: int) -> None:
        if self.process.alive:
            self.process.after(self._draw.uniform(*END_S), "a rank has ended", self._report, number)

    def _report(self, number: int) -> bool:
        if number in self._reported:
            return False
        self._reported.add(number)
        self._mail.take(number, None)
        return True

    def _end(self, text: str, refused: bool) -> None:
        if all(rank.process.alive for rank in self.ranks.values()):
            raise Violation(f"{self.process.name} has lost its group: {text}")
        self._on_end()


def own_checksum(model: CheckedModel, held: KVShard) -> OwnChecksum:
    """Return the checksum of one rank's pages, ready at once. Nothing damages what goes beside them."""

    def of(pages: Sequence[int], tail: Tail, num_tokens: int | None) -> Parts:
        parts = {held.name: page_sum(model, held, pages, num_tokens)}
        return lambda: parts

    return of


class GroupExecutor(Executor):
    """The leading executor, watched: adapters are named before the plan leaves, and what is collected has been run everywhere."""

    def __init__(self, own: SimExecutor, group: SimGroup, *, attention: Callable[[], None] | None) -> None:
        leading: Any = own
        super().__init__([leading], ranks=group.followers, attention=attention)
        self._own, self._group = own, group

    def launch(self, plan: Plan) -> Any:
        return super().launch(self._own.named(plan))

    def launch_forward(self, plan: Plan) -> Any:
        return super().launch_forward(self._own.named(plan))

    def collect(self, launch: Any) -> StepResult:
        result = super().collect(launch)
        self._group.check_collected(launch.plan)
        return result
