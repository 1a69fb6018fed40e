"""Other weights for the model that runs: read beside the running loop, taken between two steps.

Owns the checkpoint path and the version of the weights. The caller decides when it is safe to take them (no request has KV
of the old ones). A checkpoint that does not fit changes nothing. Both sets of weights are in memory while one is read.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict

import torch

from engine.config import EngineConfig
from engine.kv.identity import fingerprint
from engine.model_files.model_config import ModelConfig, load_model_config
from engine.models.causal_lm import CausalLM
from engine.models.registry import load_model
from service.flags import ConfigError

FREE_FIELDS = ("dtype",)  # how weights are stored; they are converted to the engine's type


class WeightUpdater:
    """`config` is resolved, `model` describes what runs; `install` makes the executor use a model from the next step on."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        model: ModelConfig,
        install: Callable[[CausalLM], None],
        taken: Callable[[str, str], None] | None = None,
    ) -> None:
        """`taken` is called with (version, fingerprint of the files) when other weights are in place."""
        self.model_path = config.model_path
        self.version = config.weight_version
        self._taken = taken
        self._fingerprint = ""  # of the checkpoint that was read last
        self._config = config
        self._model = model
        self._install = install

    def read(self, model_path: str, *, when_done: Callable[[], None]) -> Future[CausalLM]:
        """Start to read a checkpoint. The future raises ConfigError if it does not fit; its thread calls `when_done`."""
        future: Future[CausalLM] = Future()
        future.add_done_callback(lambda _: when_done())
        # A daemon: a scheduler that ends does not wait for a disk.
        threading.Thread(target=self._read_into, args=(future, model_path), name="weights", daemon=True).start()
        return future

    def take(self, model: CausalLM, *, model_path: str, version: str | None) -> None:
        """No step may be in flight, and no KV of the old weights may be used any more."""
        self._install(model)
        self.model_path = model_path
        self.version = self.version if version is None else version
        if self._taken is not None:
            self._taken(self.version, self._fingerprint)

    def _read_into(self, future: Future[CausalLM], model_path: str) -> None:
        try:
            future.set_result(self._read(model_path))
        except BaseException as error:  # raised by the future
            future.set_exception(error)

    def _read(self, model_path: str) -> CausalLM:
        found = load_model_config(model_path)
        check_fits(self._model, found)
        before = fingerprint(model_path)
        try:
            model = load_model(
                model_path,
                found,
                dtype=self._config.dtype,
                device=self._config.device,
                progress=False,
                context_length=self._config.context_length,
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"no memory for a second set of weights beside the first ({error})") from error
        self._fingerprint = fingerprint(model_path)
        if self._fingerprint != before:
            raise ConfigError(f"{model_path}: its files changed while they were read; try again when they are complete")
        if self._config.device == "cuda":
            torch.cuda.synchronize()  # the copies were enqueued on this thread's stream
        return model


def check_fits(running: ModelConfig, found: ModelConfig) -> None:
    """Raises ConfigError naming the first field in which the two models differ."""
    theirs = asdict(found)
    for name, value in asdict(running).items():
        if name not in FREE_FIELDS and theirs[name] != value:
            raise ConfigError(f"config.json: {name} is {theirs[name]}, the running model has {value}")
