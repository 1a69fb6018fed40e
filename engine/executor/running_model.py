"""The model that a rank's steps run, until others take its place."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they import torch, which a simulated rank does without
    from engine.executor.forward_pass import ForwardPass
    from engine.models.decoder import DenseDecoder


class RunningModel:
    """All in stream order (`Executor.call`). `forward_pass` knows it, too."""

    def __init__(self, model: "DenseDecoder", forward_pass: "ForwardPass") -> None:
        self._model: DenseDecoder | None = model
        self._forward_pass = forward_pass
        forward_pass.attach(model)

    @property
    def released(self) -> bool:
        return self._model is None

    @property
    def model(self) -> "DenseDecoder":
        assert self._model is not None, "its weights are released"
        return self._model

    def use(self, model: "DenseDecoder", *, needs_graphs: bool = True) -> None:
        """Run another model of the same shape from the next step on.

        `needs_graphs`: raise torch.OutOfMemoryError rather than go on without: other ranks have theirs.
        """
        self._model = model
        self._forward_pass.attach(model)
        if needs_graphs:
            self._forward_pass.record(model)
        else:
            self._forward_pass.record_if_possible(model)

    def drop(self) -> None:
        """Forget the model and what was recorded of it, until `use`. No step comes meanwhile."""
        self._model = None
        self._forward_pass.detach()

    def record(self) -> None:
        """Record the graphs, if there are any: all ranks at once, before the first step. Raises torch.OutOfMemoryError."""
        self._forward_pass.record(self.model)
