"""Follower loop: runs messages in the leader's order, without decisions or clocks."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from engine.core.plan import Plan
from engine.executor.model_runner import RunningModel
from engine.executor.step_part import logit_calls
from engine.ranks.messages import Apply, Channel, Done, Prepare, Step, ToFollower, plan_of
from service.flags import ConfigError
from service.process.message_stream import ChannelClosed
from service.waiter import start_in_thread

if TYPE_CHECKING:
    from engine.executor.model_runner import Copies
    from engine.executor.passes import ForwardPass
    from engine.executor.states import States
    from engine.executor.step_part import FutureMap, TokenDrafter
    from engine.kv.page_copies import Arrival
    from engine.models.decoder import DenseDecoder
    from engine.parallel.stage_link import HiddenStates


@dataclass(eq=False, kw_only=True)
class RankRunner:
    """A follower's part of steps: copies, page rows, forward, then hidden states or logits.

    `drafts`, `states`: as in ModelRunner. `after`: link to the next stage; the last stage has none
    and computes its columns of the logits.
    """

    model: InitVar["DenseDecoder"]
    copies: "Copies"
    forward_pass: "ForwardPass"
    future_map: "FutureMap"
    after: "HiddenStates | None"
    drafts: "TokenDrafter | None" = None
    states: "States | None" = None

    def __post_init__(self, model: "DenseDecoder") -> None:
        self.running = RunningModel(model, self.forward_pass)

    def run(self, plan: Plan) -> None:
        """Return once no copy of the step touches this rank's pages.

        On a GPU the step is enqueued, and the leader's result reports its end.
        """
        if plan.rewinds:
            assert self.states is not None, "the model has no states"
            self.states.rewind(self.running.model, plan.rewinds)
        arrivals = self.copies.begin(plan)
        for opened in plan.opens:
            self.forward_pass.open(opened)
        self.forward_pass.prepare(self.running.model, plan)
        if not plan.items:
            self.forward_pass.join(self.running.model, plan, arrivals)
            self.copies.wait(plan.seq)
            return
        if plan.skips_model:
            self._draft(plan, arrivals)
            return
        forward = self.forward_pass.run(self.running.model, plan, arrivals)
        if self.after is not None:
            self.after.send(forward.hidden)
        elif not forward.gave_logits:
            for rows in logit_calls(plan.items):
                self.running.model.logits(forward.hidden[rows])
        if any(item.sample for item in plan.items):
            self.future_map.on_sampled()  # before `accept`, as on the leader: both may exchange
        if self.drafts is not None and any(item.draft for item in plan.items):
            self.drafts.accept(plan.items, None)
        self.copies.wait(plan.seq)

    def _draft(self, plan: Plan, arrivals: "Sequence[Arrival]") -> None:
        assert self.drafts is not None, "a plan asks a drafter, and there is none"
        for arrival in arrivals:
            arrival.hold_all()
        self.forward_pass.place(plan)
        self.drafts.draft(self.running.model, plan.items)
        self.copies.wait(plan.seq)


log = logging.getLogger(__name__)

Reader = Callable[..., Any]  # raises ConfigError; runs in its own thread
# Takes the prepared reader's result, if any. Its value, or a Future's, is the answer.
Action = Callable[..., Any]


class LostStep(RuntimeError):
    """Steps are missing: this rank's state is unknown."""


@dataclass(eq=False)
class Follower:
    channel: Channel[ToFollower]
    runner: RankRunner
    _: KW_ONLY
    readers: dict[str, Reader]
    actions: dict[str, Action]
    turning: Callable[[bool], None]
    _prepared: dict[int, Any] = field(default_factory=dict, init=False)
    _last_seq: int = field(default=0, init=False)

    def run(self) -> None:
        try:
            while True:
                message = self.channel.receive()
                self.turning(True)
                self.handle(message)
                self.turning(False)
        except ChannelClosed:
            log.debug("the leader has ended")

    def handle(self, message: ToFollower) -> None:
        """Raises LostStep."""
        match message:
            case Step():
                self._count(message.seq)
                self.runner.run(plan_of(message))
                if message.answer:
                    self.channel.send(Done(message.answer))
            case Prepare():
                start_in_thread(lambda: self._prepare(message), name=message.name, when_done=lambda: None)
            case Apply():
                self._apply(message)
            case _:
                raise AssertionError(f"{type(message).__name__} after the start")

    def _count(self, seq: int) -> None:
        if seq == 0:  # warm-up
            return
        if seq != self._last_seq + 1:
            raise LostStep(f"step {seq} comes after step {self._last_seq}: a step is lost, repeated or out of order")
        self._last_seq = seq

    def _prepare(self, message: Prepare) -> None:
        try:
            self._prepared[message.number] = self.readers[message.name](**message.args)
        except ConfigError as error:
            self.channel.send(Done(message.number, error=str(error)))
        else:
            self.channel.send(Done(message.number))

    def _apply(self, message: Apply) -> None:
        args = dict(message.args)
        prepared = [self._prepared.pop(args.pop("prepared"), None)] if "prepared" in args else []
        try:
            value = self.actions[message.name](*prepared, **args)
        except ConfigError as error:
            self.channel.send(Done(message.number, error=str(error)))
            return
        if isinstance(value, Future):
            value.add_done_callback(lambda ended: self._answer_later(message.number, ended))
        else:
            self.channel.send(Done(message.number, value=value))

    def _answer_later(self, number: int, ended: "Future[Any]") -> None:
        with contextlib.suppress(ChannelClosed):
            self.channel.send(Done(number, value=ended.result()))
