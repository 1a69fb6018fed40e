"""Model in use by a rank's steps."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch, which a simulated rank lacks
    from engine.executor.forward_pass import ForwardPass
    from engine.models.decoder import DenseDecoder


class RunningModel:
    """Holder of the model, used in stream order."""

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
        """Use another model of the same shape.

        `needs_graphs`: raise torch.OutOfMemoryError instead of continuing without.
        """
        self._model = model
        self._forward_pass.attach(model)
        if needs_graphs:
            self._forward_pass.record(model)
        else:
            self._forward_pass.record_if_possible(model)

    def drop(self) -> None:
        """Drop model and recordings until `use`; no step may come."""
        self._model = None
        self._forward_pass.detach()

    def record(self) -> None:
        """Record graphs on all ranks before the first step. Raises torch.OutOfMemoryError."""
        self._forward_pass.record(self.model)
