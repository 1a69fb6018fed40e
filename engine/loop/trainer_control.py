"""Joins and departures of process groups that trainers open for new weights."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from engine.messages import ControlReply, JoinTrainer, LeaveTrainer
from service.flags import ConfigError
from service.waiter import start_in_thread

log = logging.getLogger(__name__)


class Trainers(Protocol):
    """Groups on all ranks; both calls wait for other processes, and raise ConfigError."""

    def join(self, asked: JoinTrainer) -> None: ...

    def leave(self, name: str) -> None: ...


@dataclass(eq=False)
class TrainerControl:
    """Control of `trainers` in threads; None in an engine without."""

    trainers: Trainers | None
    _: KW_ONLY
    reply: Callable[[ControlReply], None]
    wakeup: Callable[[], None]
    _calls_of_turn: list[Callable[[float], None]] = field(default_factory=list, init=False)
    _running: list[tuple[JoinTrainer | LeaveTrainer, Future[None]]] = field(default_factory=list, init=False)

    def enter_when_used(self, calls: list[Callable[[float], None]]) -> None:
        self._calls_of_turn = calls

    def on_message(self, message: JoinTrainer | LeaveTrainer) -> None:
        if self.on_turn not in self._calls_of_turn:
            self._calls_of_turn.append(self.on_turn)
        future = start_in_thread(lambda: self._run(message), name="trainer", when_done=self.wakeup)
        self._running.append((message, future))

    def on_turn(self, now_s: float) -> None:
        done = [(message, future) for message, future in self._running if future.done()]
        self._running = [entry for entry in self._running if entry not in done]
        for message, future in done:
            self._answer(message, future.exception())

    def _run(self, message: JoinTrainer | LeaveTrainer) -> None:
        if self.trainers is None:
            raise ConfigError("this worker joins no groups of trainers")
        if isinstance(message, JoinTrainer):
            self.trainers.join(message)
        else:
            self.trainers.leave(message.name)

    def _answer(self, message: JoinTrainer | LeaveTrainer, error: BaseException | None) -> None:
        joins = isinstance(message, JoinTrainer)
        if error is None:
            done = "initialize" if joins else "destroy"
            log.info("%s the process group %r of a trainer", "joined" if joins else "left", message.name)
            self.reply(ControlReply(message.call_id, True, f"Succeeded to {done} custom process group."))
            return
        if not isinstance(error, ConfigError):
            log.error("the process group %r of a trainer failed", message.name, exc_info=error)
            error = ConfigError(f"group_name: {message.name!r} failed: {error}")
        self.reply(ControlReply(message.call_id, False, str(error), status=400))
