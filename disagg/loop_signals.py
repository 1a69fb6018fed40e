"""How signals end the loop of a scheduler process."""

import signal
from collections.abc import Callable

from engine.loop.loop import EngineLoop


def end_on_signals(loop: EngineLoop, attention: Callable[[], None]) -> None:
    """`attention`: ends the loop's rest."""

    def on_sigterm(signum: int, frame: object) -> None:
        loop.stopped = True
        attention()

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
