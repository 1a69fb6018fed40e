"""A thread of a simulated process: one act, called again after the pause it returns, or sooner when it is woken."""

from collections.abc import Callable

from tools.simulation.world import Event, Process


class Activity:
    """`act()` returns seconds until its next turn, None: only when woken. `lag_s()`: how long a wake-up takes."""

    def __init__(
        self, process: Process, label: str, act: Callable[[], float | None], *, lag_s: Callable[[], float]
    ) -> None:
        self._process = process
        self._label = label
        self._act = act
        self._lag_s = lag_s
        self._event: Event | None = None

    def wake(self) -> None:
        self._within(self._lag_s())

    def _within(self, delay_s: float) -> None:
        due_s = self._process.world.now_s + delay_s
        if self._event is not None:
            if self._event.time_s <= due_s:
                return
            self._event.cancel()
        self._event = self._process.after(delay_s, self._label, self._run)

    def _run(self) -> None:
        self._event = None
        pause_s = self._act()
        if pause_s is not None:
            self._within(pause_s)


class Flag:
    """Stands in for the `threading.Event` that a production thread waits on."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.set = wake

    def clear(self) -> None:
        """A wake-up is never lost here."""
