"""Events of the loop for the parts around it."""

from collections.abc import Callable, Iterable, Sequence

from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.core.request import Request
from engine.messages import GenerateRequest, TokenOutput


class LoopListener:
    """Called on the loop's thread, in the order of its list."""

    def on_received(self, message: GenerateRequest, now_s: float) -> None:
        """A request has arrived from the frontend."""

    def on_added(self, request: Request, now_s: float) -> None:
        """Called before a request goes to the role or to the grammar queue."""

    def on_planned(self, now_s: float) -> None:
        """The turn has planned a step or found none."""

    def on_launch(self, plan: Plan, now_s: float) -> None:
        """A step is about to be launched."""

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        """A step has been collected."""

    def on_outputs(self, outputs: Sequence[TokenOutput], now_s: float) -> None:
        """Outputs are about to be sent."""

    def on_worked(self, taken_s: float) -> None:
        """A turn with a step is over; its wait for the device counts."""

    def on_rest(self, now_s: float) -> None:
        """Called when nothing is left to compute."""

    def shorten(self, wait_s: float, now_s: float) -> float:
        """Shorten a rest of `wait_s` so that the loop turns when it is time to."""
        return wait_s


def methods_for(event: str, listeners: Iterable[LoopListener]) -> list[Callable[..., None]]:
    """Return the methods of this name of the listeners that have one of their own, in their order."""
    default = getattr(LoopListener, event)
    return [getattr(listener, event) for listener in listeners if getattr(type(listener), event) is not default]
