"""Adapters of a running engine: read beside the loop, given to the stream and taken from it in its order.

An adapter that does not fit changes nothing. engine/core/adapters.py knows which requests use which adapter.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from engine.layers.linear import SiteShape
from engine.lora.bank import AdapterBank
from engine.lora.weights import AdapterWeights, read_adapter
from service.flags import ConfigError


class LoraStore:
    """`in_order` runs work in stream order and waits for it (`Executor.call`). `max_rank`: None is any."""

    def __init__(
        self,
        *,
        bank: AdapterBank,
        sites: Sequence[SiteShape],
        dtype: torch.dtype,
        device: torch.device,
        max_rank: int | None,
        in_order: Callable[[Callable[[], object]], object],
    ) -> None:
        self._bank = bank
        self._sites = sites
        self._dtype = dtype
        self._device = device
        self._max_rank = max_rank
        self._in_order = in_order

    def start_reading(self, path: str, *, when_done: Callable[[], None]) -> Future[AdapterWeights]:
        """Start to read an adapter. The future raises ConfigError if it does not fit; its thread calls `when_done`."""
        future: Future[AdapterWeights] = Future()
        future.add_done_callback(lambda _: when_done())
        # A daemon: a scheduler that ends does not wait for a disk.
        threading.Thread(target=self._read_into, args=(future, path), name="lora", daemon=True).start()
        return future

    def read(self, path: str) -> AdapterWeights:
        """Raises ConfigError."""
        try:
            weights = read_adapter(path, self._sites, dtype=self._dtype, device=self._device, max_rank=self._max_rank)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"{path}: no memory for another adapter ({error}); unload one") from error
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # the copies were enqueued on this thread's stream
        return weights

    def install(self, number: int, weights: AdapterWeights) -> None:
        """Every step launched from now on may use it."""
        self._in_order(lambda: self._bank.add(number, weights))

    def remove(self, number: int) -> None:
        """No step launched from now on uses it; its memory is free once the launched ones have been computed."""
        self._in_order(lambda: self._bank.remove(number))

    def _read_into(self, future: Future[AdapterWeights], path: str) -> None:
        try:
            future.set_result(self.read(path))
        except BaseException as error:  # raised by the future
            future.set_exception(error)
