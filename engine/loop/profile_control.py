"""Profiles of a running engine, one at a time, for some steps or until stopped."""

import logging
from collections.abc import Callable
from typing import Protocol

from engine.core.outputs import StepEffects
from engine.loop.listener import LoopListener
from engine.messages import ControlReply, StartProfile, StopProfile
from service.flags import ConfigError

log = logging.getLogger(__name__)


class Profiler(Protocol):
    def start(self, asked: StartProfile) -> str: ...

    def stop(self) -> str: ...


class ProfileControl(LoopListener):
    def __init__(self, profiler: Profiler, *, reply: Callable[[ControlReply], None]) -> None:
        self._profiler = profiler
        self._reply = reply
        self._steps_left: int | None = None  # None: until stopped

    def on_message(self, message: StartProfile | StopProfile) -> None:
        if isinstance(message, StartProfile):
            self._start(message)
        else:
            self._stop(message.call_id)

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self._stop(None)

    def _start(self, message: StartProfile) -> None:
        if message.num_steps is not None and message.num_steps < 1:
            return self._refuse(message.call_id, f"num_steps: must be at least 1, got {message.num_steps}")
        try:
            file = self._profiler.start(message)
        except ConfigError as error:
            return self._refuse(message.call_id, str(error))
        self._steps_left = message.num_steps
        self._reply(ControlReply(message.call_id, True, "Start profiling.", values={"file": file}))

    def _stop(self, call_id: str | None) -> None:
        self._steps_left = None
        try:
            file = self._profiler.stop()
        except ConfigError as error:
            log.error("profile: %s", error)
            if call_id is not None:
                self._refuse(call_id, str(error))
            return
        log.info("profile written to %s", file)
        if call_id is not None:
            self._reply(ControlReply(call_id, True, "Stop profiling.", values={"file": file}))

    def _refuse(self, call_id: str, message: str) -> None:
        self._reply(ControlReply(call_id, False, message, status=400))
