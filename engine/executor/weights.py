"""Weight updates: read in parallel to the loop, installed between steps.

The caller ensures that no request has old KV. Both weight sets are in memory meanwhile.
"""

import hashlib
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import InitVar, asdict, dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from engine.kv.kv_pool import WeightsNumber, fingerprint, weights_number
from engine.messages import NewTensors
from engine.model_files.model_config import ModelConfig, load_model_config
from service.flags import ConfigError
from service.waiter import start_in_thread

M = TypeVar("M")  # model type

FREE_FIELDS = ("dtype", "stored")  # converted to the engine's type; `quantization` has what must be equal


class Changed(Protocol):
    """Tensors over those of a checkpoint."""

    @property
    def files(self) -> list[str]: ...

    @property
    def digest(self) -> str: ...


class Changes(Protocol):
    """Reader of new tensors (engine/trainers/changes.py)."""

    def read(self, current: Any, model_path: str, tensors: NewTensors) -> Changed | None:
        """`current`, which this gave or None, with `tensors` over it. Raises ConfigError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightActions(Generic[M]):
    """Steps of an update on all ranks; `install` and `drop` act on the executor.

    - load(model_path, config, progress=...): reads a model; with changed=FILES, if there are any,
      and adds=True if the running model has all but the last. discard: drops other ranks' reads
    - taken(version, fingerprint): called after an update
    """

    load: Callable[..., M]
    install: Callable[[M], None]
    drop: Callable[[], None]
    taken: Callable[[str, str], None] = lambda version, fingerprint: None
    discard: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where weights come from: a checkpoint, and tensors over it."""

    model_path: str
    changed: Changed | None = None


@dataclass(eq=False, kw_only=True)
class WeightUpdater(Generic[M]):
    """`dummies`: paths with random weights. `changes`: reader of tensors, or why there is none.
    `undoes`: keep the source of the weights before an update, for `NewTensors.undo`.
    """

    path: InitVar[str]
    version: str
    model: ModelConfig
    actions: WeightActions[M]
    on_cuda: bool
    dummies: Collection[str] = ()
    changes: Changes | str = "this engine takes no tensors"
    undoes: bool = False

    def __post_init__(self, path: str) -> None:
        self.released = False
        self._source = self._before = self._source_read = WeightSource(path)
        self._fingerprint = ""  # of the last checkpoint read
        self.number = WeightsNumber(lambda: weights_number(self.model_path, dummy=self.model_path in self.dummies))
        self._number_read = 0

    @property
    def model_path(self) -> str:
        return self._source.model_path

    @property
    def source(self) -> str:
        return "checkpoint" if self._source.changed is None else "tensors"

    def read(self, model_path: str, *, when_done: Callable[[], None], tensors: NewTensors | None = None) -> Future[M]:
        """Read `tensors`, else `model_path`, in a thread, which calls `when_done`.

        The future raises ConfigError.
        """
        return start_in_thread(lambda: self._read(model_path, tensors), name="weights", when_done=when_done)

    def take(self, model: M, *, model_path: str, version: str | None) -> None:
        """Install the `model` last read, with no step in flight and no old KV in use."""
        self.actions.install(model)
        self.released = False
        before, self._source = self._source, replace(self._source_read, model_path=model_path)
        self._before = before if self.undoes else self._source
        self.number.take(self._number_read)
        self.version = self.version if version is None else version
        self.actions.taken(self.version, self._fingerprint)

    def release(self) -> None:
        """Free the weights until `take`; no step may come."""
        self.actions.drop()
        self.released = True
        if self.on_cuda:
            torch.cuda.empty_cache()

    def discard(self, model: M) -> None:
        self.actions.discard()

    def _read(self, model_path: str, tensors: NewTensors | None) -> M:
        source = WeightSource(model_path) if tensors is None else self._with(tensors)
        model_path, changed = source.model_path, source.changed
        digest = "" if changed is None else changed.digest
        found = load_model_config(model_path)
        check_fits(self.model, found)
        dummy = model_path in self.dummies
        before = fingerprint(model_path, dummy=dummy)
        adds = tensors is not None and tensors.has_any and not self.released
        more = {} if changed is None else {"changed": changed.files, "adds": adds}
        try:
            model = self.actions.load(model_path, found, progress=False, **more)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"no memory for a second set of weights beside the first ({error}); --mem-fraction-static must leave room"
            ) from error
        after = fingerprint(model_path, dummy=dummy)
        number = weights_number(model_path, dummy=dummy)
        if digest:
            number = int(hashlib.sha256(f"{number} {digest}".encode()).hexdigest()[:16], 16)
        self._number_read = number
        self._fingerprint = f"{after}+{digest}" if digest else after
        self._source_read = source
        if after != before:
            self.actions.discard()
            raise ConfigError(f"{model_path}: its files changed while they were read; try again when they are complete")
        if self.on_cuda:
            torch.cuda.synchronize()  # the copies were enqueued on this thread's stream
        return model

    def _with(self, tensors: NewTensors) -> WeightSource:
        """Raises ConfigError."""
        if tensors.undo:
            return self._before
        if not tensors.has_any:
            return self._source
        if isinstance(self.changes, str):
            raise ConfigError(self.changes)
        model_path = self._source.model_path
        return WeightSource(model_path, self.changes.read(self._source.changed, model_path, tensors))


def check_fits(running: ModelConfig, found: ModelConfig) -> None:
    """Raise ConfigError with the first different field."""
    theirs = asdict(found)
    for name, value in asdict(running).items():
        if name not in FREE_FIELDS and theirs[name] != value:
            there, here = ("none" if one == "" else one for one in (theirs[name], value))
            raise ConfigError(f"config.json: {name} is {there}, the running model has {here}")
