"""Events of the loop for the parts around it."""

from collections.abc import Callable, Iterable, Sequence

from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.core.request import Request
from engine.messages import GenerateRequest, TokenOutput


class LoopListener:
    """Listeners are called on the loop's thread, in order."""

    def on_received(self, message: GenerateRequest, now_s: float) -> None:
        """A request has arrived from the frontend."""

    def on_added(self, request: Request, now_s: float) -> None:
        """A request is about to enter the role or grammar queue."""

    def on_planned(self, now_s: float) -> None:
        """The iteration has planned a step or found none."""

    def on_launch(self, plan: Plan, now_s: float) -> None:
        """A step is about to be launched."""

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        """A step has been collected."""

    def on_outputs(self, outputs: Sequence[TokenOutput], now_s: float) -> None:
        """Outputs are about to be sent."""

    def on_worked(self, taken_s: float) -> None:
        """An iteration with a step has ended; `taken_s` includes waiting for the device."""

    def on_rest(self, now_s: float) -> None:
        """Nothing is left to compute."""

    def shorten(self, wait_s: float, now_s: float) -> float:
        """Return a shorter wait if the loop is needed earlier."""
        return wait_s


def methods_for(event: str, listeners: Iterable[LoopListener]) -> list[Callable[..., None]]:
    """Return the listeners' own overrides of method `event`, in order."""
    default = getattr(LoopListener, event)
    return [getattr(listener, event) for listener in listeners if getattr(type(listener), event) is not default]
