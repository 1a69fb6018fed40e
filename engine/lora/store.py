"""Adapters of a running engine: read in threads, installed and removed in stream order.

engine/core/adapters.py tracks their requests.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from engine.background import start_in_thread
from engine.layers.linear import SiteShape
from engine.lora.bank import AdapterBank
from engine.lora.weights import AdapterWeights, read_adapter
from service.flags import ConfigError


class LoraStore:
    """Loads and unloads adapters.

    `in_order` runs work in stream order and waits. `elsewhere`: sites of other stages.
    """

    def __init__(
        self,
        *,
        bank: AdapterBank,
        sites: Sequence[SiteShape],
        elsewhere: Sequence[SiteShape] = (),
        dtype: torch.dtype,
        device: torch.device,
        max_rank: int | None,
        in_order: Callable[[Callable[[], object]], object],
    ) -> None:
        self._bank = bank
        self._sites = sites
        self._elsewhere = elsewhere
        self._dtype = dtype
        self._device = device
        self._max_rank = max_rank
        self._in_order = in_order

    def start_reading(self, path: str, *, when_done: Callable[[], None]) -> Future[AdapterWeights]:
        """The thread calls `when_done`. The future may raise ConfigError."""
        return start_in_thread(lambda: self.read(path), name="lora", when_done=when_done)

    def read(self, path: str) -> AdapterWeights:
        """Raises ConfigError."""
        try:
            weights = read_adapter(
                path,
                self._sites,
                dtype=self._dtype,
                device=self._device,
                max_rank=self._max_rank,
                elsewhere=self._elsewhere,
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"{path}: no memory for another adapter ({error}); unload one") from error
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # this thread's stream copies them
        return weights

    def install(self, number: int, weights: AdapterWeights) -> None:
        self._in_order(lambda: self._bank.add(number, weights))

    def remove(self, number: int) -> None:
        """Memory is freed after earlier steps."""
        self._in_order(lambda: self._bank.remove(number))
