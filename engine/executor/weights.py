"""Weight updates: read in parallel to the loop, installed between steps.

The caller ensures that no request has old KV. Both weight sets are in memory meanwhile.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

import torch

from engine.kv.kv_pool import WeightsNumber, fingerprint, weights_number
from engine.model_files.model_config import ModelConfig, load_model_config
from service.flags import ConfigError
from service.waiter import start_in_thread

M = TypeVar("M")  # model type

FREE_FIELDS = ("dtype", "stored")  # converted to the engine's type; `quantization` has what must be equal


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightActions(Generic[M]):
    """Steps of an update on all ranks; `install` and `drop` act on the executor.

    - load(model_path, config, progress=...): reads a model; discard: drops other ranks' reads
    - taken(version, fingerprint): called after an update
    """

    load: Callable[..., M]
    install: Callable[[M], None]
    drop: Callable[[], None]
    taken: Callable[[str, str], None] = lambda version, fingerprint: None
    discard: Callable[[], None] = lambda: None


class WeightUpdater(Generic[M]):
    """Updater of the running `model`. `dummies`: paths with random weights."""

    def __init__(
        self,
        *,
        model_path: str,
        version: str,
        model: ModelConfig,
        actions: WeightActions[M],
        on_cuda: bool,
        dummies: Collection[str] = (),
    ) -> None:
        self.model_path = model_path
        self.version = version
        self.released = False
        self._model = model
        self._actions = actions
        self._on_cuda = on_cuda
        self._dummies = dummies
        self._fingerprint = ""  # of the last checkpoint read
        self.number = WeightsNumber(self._number_in_use)
        self._number_read = 0

    def read(self, model_path: str, *, when_done: Callable[[], None]) -> Future[M]:
        """Read in a thread, which calls `when_done`; the future raises ConfigError."""
        return start_in_thread(lambda: self._read(model_path), name="weights", when_done=when_done)

    def take(self, model: M, *, model_path: str, version: str | None) -> None:
        """Install `model`, with no step in flight and no old KV in use."""
        self._actions.install(model)
        self.released = False
        self.model_path = model_path
        self.number.take(self._number_read)
        self.version = self.version if version is None else version
        self._actions.taken(self.version, self._fingerprint)

    def release(self) -> None:
        """Free the weights until `take`; no step may come."""
        self._actions.drop()
        self.released = True
        if self._on_cuda:
            torch.cuda.empty_cache()

    def discard(self, model: M) -> None:
        self._actions.discard()

    def _number_in_use(self) -> int:
        return weights_number(self.model_path, dummy=self.model_path in self._dummies)

    def _read(self, model_path: str) -> M:
        found = load_model_config(model_path)
        check_fits(self._model, found)
        dummy = model_path in self._dummies
        before = fingerprint(model_path, dummy=dummy)
        try:
            model = self._actions.load(model_path, found, progress=False)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"no memory for a second set of weights beside the first ({error}); --mem-fraction-static must leave room"
            ) from error
        self._fingerprint = fingerprint(model_path, dummy=dummy)
        self._number_read = weights_number(model_path, dummy=dummy)
        if self._fingerprint != before:
            self._actions.discard()
            raise ConfigError(f"{model_path}: its files changed while they were read; try again when they are complete")
        if self._on_cuda:
            torch.cuda.synchronize()  # the copies were enqueued on this thread's stream
        return model


def check_fits(running: ModelConfig, found: ModelConfig) -> None:
    """Raise ConfigError with the first different field."""
    theirs = asdict(found)
    for name, value in asdict(running).items():
        if name not in FREE_FIELDS and theirs[name] != value:
            there, here = ("none" if one == "" else one for one in (theirs[name], value))
            raise ConfigError(f"config.json: {name} is {there}, the running model has {here}")
