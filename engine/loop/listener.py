"""What the parts around the loop learn from it. The loop calls each listener of one list, in that order."""

from collections.abc import Sequence

from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.core.request import Request
from engine.messages import GenerateRequest, TokenOutput


class LoopListener:
    """Receives events of the loop, on its thread. Each does nothing by default."""

    def on_received(self, message: GenerateRequest, now_s: float) -> None:
        """A request has come from the frontend."""

    def on_added(self, request: Request, now_s: float) -> None:
        """It goes to the role, or to the grammar queue first."""

    def on_planned(self, now_s: float) -> None:
        """The scheduler has planned a step, or found none."""

    def on_launch(self, plan: Plan, now_s: float) -> None:
        """A step is about to be launched."""

    def on_step(self, effects: StepEffects, now_s: float) -> None:
        """A step has been collected."""

    def on_outputs(self, outputs: Sequence[TokenOutput], now_s: float) -> None:
        """Outputs are about to be sent. One with a `finish` is the request's last."""

    def on_worked(self, taken_s: float) -> None:
        """A turn that had something to compute is over; its wait for the device counts."""

    def on_rest(self, now_s: float) -> None:
        """There is nothing left to compute."""
