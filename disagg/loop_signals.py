"""Signal handler that ends a scheduler process's loop."""

import signal
from collections.abc import Callable

from engine.loop.loop import EngineLoop
from service.process.stop_signals import END


def end_by_parent(loop: EngineLoop, attention: Callable[[], None]) -> None:

    def on_end(signum: int, frame: object) -> None:
        loop.stopped = True
        attention()

    signal.signal(END, on_end)
