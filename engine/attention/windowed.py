"""Attention of models with window layers in their own KV pool: one backend per pool."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.torch_backend import CpuBackend, TorchBackend
from engine.kv.step_batch import StepBatch

OnePool = CpuBackend | TorchBackend


class WindowedBackend:
    """Backends per pool; `full` is None if all layers have windows.

    Kernels read no page before a row's window: the table holds reassigned pages there.
    """

    def __init__(self, full: OnePool | None, windows: OnePool, *, in_window: Sequence[bool]) -> None:
        self._full = full
        self._windows = windows
        self._places = [
            (windows if inside else full, sum(in_window[:n] if inside else (not i for i in in_window[:n])))
            for n, inside in enumerate(in_window)
        ]

    @property
    def has_kernel(self) -> bool:
        backends = [backend for backend in (self._full, self._windows) if backend is not None]
        return all(isinstance(backend, CpuBackend) and backend.has_kernel for backend in backends)

    def begin(self, step: StepBatch) -> None:
        assert step.windows is not None, "a step of windows knows their pages"
        if self._full is not None:
            self._full.begin(step)
        self._windows.begin(replace(step, page_table=step.windows.page_table, token_pages=step.windows.token_pages))

    def attend(self, layer: int, new: Any) -> torch.Tensor:
        backend, place = self._places[layer]
        assert backend is not None
        return backend.attend(place, new)


def windowed(full: AttentionBackend | None, windows: AttentionBackend, *, in_window: Sequence[bool]) -> WindowedBackend:
    assert isinstance(windows, OnePool) and (full is None or isinstance(full, OnePool)), (full, windows)
    return WindowedBackend(full, windows, in_window=in_window)
