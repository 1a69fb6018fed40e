"""Other weights of a simulated worker. Their KV is the same, so that answers can be judged; what was cached before is gone.

Whoever reads KV of the time before finds nothing there, which the executor takes for a wrong page.
"""

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from engine.messages import NewTensors
from service.flags import ConfigError
from tools.simulation.world import Process

READ_S = (0.001, 0.5)
BROKEN = "broken"  # a checkpoint that cannot be read
OWN, OTHER = "simulated", "other weights"


class SimWeights:
    """engine/loop/control.py's `Weights`."""

    source = "checkpoint"

    def __init__(
        self, process: Process, forget: Callable[[], None], draw: random.Random, *, model_path: str = OWN
    ) -> None:
        self.model_path = model_path
        self.version = "default"
        self.released = False
        self._process = process
        self._forget = forget
        self._draw = draw

    def number(self) -> int:
        """Return what tells them from others: features of one number are not those of another."""
        return int(self.model_path != OWN)

    def read(
        self, model_path: str, *, when_done: Callable[[], None], tensors: NewTensors | None = None
    ) -> "Future[Any]":
        result: Future[Any] = Future()

        def done() -> None:
            if model_path == BROKEN:
                result.set_exception(ConfigError("no checkpoint"))
            else:
                result.set_result(model_path)
            when_done()

        self._process.after(self._draw.uniform(*READ_S), "weights read", done)
        return result

    def release(self) -> None:
        self.released = True

    def take(self, model: Any, *, model_path: str, version: str | None) -> None:
        self.model_path, self.version = model_path, version or self.version
        self.released = False
        self._forget()
        self._process.world.seen["weights taken"] += 1

    def discard(self, model: Any) -> None:
        """What was read is not taken: nothing is kept of it here."""
