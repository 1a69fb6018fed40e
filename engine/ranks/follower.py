"""The loop of a follower: one message after another, in the leader's order. It decides nothing and reads no clock."""

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from engine.background import start_in_thread
from engine.ranks.channel import Channel
from engine.ranks.messages import Apply, Done, Prepare, Step, ToFollower, plan_of
from engine.ranks.rank_runner import RankRunner
from service.flags import ConfigError
from service.process.message_stream import ChannelClosed

log = logging.getLogger(__name__)

Reader = Callable[..., Any]  # raises ConfigError; runs in a thread of its own
# Gets what a reader returned first, if it was prepared. Its value is the answer, of a Future once it is done.
Action = Callable[..., Any]


class LostStep(RuntimeError):
    """The steps that came are not the leader's: what this rank holds is unknown."""


class Follower:
    """`readers`, `actions`: by the names of Prepare and Apply. `turning(busy)` is called as work begins and ends."""

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
        """What was read and waits to be applied or forgotten."""
        return len(self._prepared)

    def run(self) -> None:
        """Serve until the leader ends."""
        try:
            while True:
                message = self._channel.receive()
                self._turning(True)
                self.handle(message)
                self._turning(False)
        except ChannelClosed:
            log.debug("the leader has ended")

    def handle(self, message: ToFollower) -> None:
        """Do what `message` says and answer it. Raises LostStep."""
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
        if seq == 0:  # of the warm-up
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
