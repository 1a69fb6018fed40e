"""Follower loop: runs messages in the leader's order, without decisions or clocks."""

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
