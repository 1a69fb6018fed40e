"""Follower loop: runs messages in the leader's order, without decisions or clocks."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
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


class RankRunner:
    """A follower's part of steps: copies, page rows, forward, then hidden states or logits.

    `drafts`, `states`: as in ModelRunner. `after`: link to the next stage; the last stage has none
    and computes its columns of the logits.
    """

    def __init__(
        self,
        *,
        model: "DenseDecoder",
        copies: "Copies",
        forward_pass: "ForwardPass",
        future_map: "FutureMap",
        after: "HiddenStates | None",
        drafts: "TokenDrafter | None" = None,
        states: "States | None" = None,
    ) -> None:
        self.running = RunningModel(model, forward_pass)
        self._copies = copies
        self._forward_pass = forward_pass
        self._future_map = future_map
        self._after = after
        self._drafts = drafts
        self._states = states

    def run(self, plan: Plan) -> None:
        """Return once no copy of the step touches this rank's pages.

        On a GPU the step is enqueued, and the leader's result reports its end.
        """
        if plan.rewinds:
            assert self._states is not None, "the model has no states"
            self._states.rewind(self.running.model, plan.rewinds)
        arrivals = self._copies.begin(plan)
        for opened in plan.opens:
            self._forward_pass.open(opened)
        self._forward_pass.prepare(self.running.model, plan)
        if not plan.items:
            self._forward_pass.join(self.running.model, plan, arrivals)
            self._copies.wait(plan.seq)
            return
        if plan.skips_model:
            self._draft(plan, arrivals)
            return
        forward = self._forward_pass.run(self.running.model, plan, arrivals)
        if self._after is not None:
            self._after.send(forward.hidden)
        elif not forward.gave_logits:
            for rows in logit_calls(plan.items):
                self.running.model.logits(forward.hidden[rows])
        if self._drafts is not None and any(item.draft for item in plan.items):
            self._drafts.accept(plan.items, None)
        self._copies.wait(plan.seq)
        if any(item.sample for item in plan.items):
            self._future_map.on_sampled()

    def _draft(self, plan: Plan, arrivals: "Sequence[Arrival]") -> None:
        assert self._drafts is not None, "a plan asks a drafter, and there is none"
        for arrival in arrivals:
            arrival.hold_all()
        self._forward_pass.place(plan)
        self._drafts.draft(self.running.model, plan.items)
        self._copies.wait(plan.seq)


log = logging.getLogger(__name__)

Reader = Callable[..., Any]  # raises ConfigError; runs in its own thread
# Takes the prepared reader's result, if any. Its value, or a Future's, is the answer.
Action = Callable[..., Any]


class LostStep(RuntimeError):
    """Steps are missing: this rank's state is unknown."""


class Follower:
    def __init__(
        self,
        channel: Channel[ToFollower],
        runner: RankRunner,
        *,
        readers: dict[str, Reader],
        actions: dict[str, Action],
        turning: Callable[[bool], None],
    ) -> None:
        self._channel = channel
        self._runner = runner
        self._readers = readers
        self._actions = actions
        self._turning = turning
        self._prepared: dict[int, Any] = {}
        self._last_seq = 0

    @property
    def num_prepared(self) -> int:
        return len(self._prepared)

    def run(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                self._turning(True)
                self.handle(message)
                self._turning(False)
        except ChannelClosed:
            log.debug("the leader has ended")

    def handle(self, message: ToFollower) -> None:
        """Raises LostStep."""
        match message:
            case Step():
                self._count(message.seq)
                self._runner.run(plan_of(message))
                if message.answer:
                    self._channel.send(Done(message.answer))
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
            self._prepared[message.number] = self._readers[message.name](**message.args)
        except ConfigError as error:
            self._channel.send(Done(message.number, error=str(error)))
        else:
            self._channel.send(Done(message.number))

    def _apply(self, message: Apply) -> None:
        args = dict(message.args)
        prepared = [self._prepared.pop(args.pop("prepared"), None)] if "prepared" in args else []
        try:
            value = self._actions[message.name](*prepared, **args)
        except ConfigError as error:
            self._channel.send(Done(message.number, error=str(error)))
            return
        if isinstance(value, Future):
            value.add_done_callback(lambda ended: self._answer_later(message.number, ended))
        else:
            self._channel.send(Done(message.number, value=value))

    def _answer_later(self, number: int, ended: "Future[Any]") -> None:
        with contextlib.suppress(ChannelClosed):
            self._channel.send(Done(number, value=ended.result()))
