"""Interface of attention backends, and their choice by name without importing others."""

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from engine.attention.flashinfer_prompts import FlashInferPrompts, check_reach, check_specs, import_wrapper
from engine.attention.latent import CpuLatents, SparseLatents, TorchLatents
from engine.attention.torch_backend import CpuBackend, TorchBackend
from engine.kernels.latent_attention import LatentKernel, make_latent_kernel
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import DeviceExtend, DeviceStep, StepBatch
from service.flags import ConfigError

INDEX = "index of latents"
NOT_IN_TRITON = (INDEX,)


class AttentionBackend(Protocol):
    """Attention over a pool: per step one `begin`, then one `attend` per layer."""

    def begin(self, step: StepBatch) -> None:
        """Prepare data shared by layers."""

    def attend(self, layer: int, new: Any) -> torch.Tensor:
        """Norm and rotate q and k, write k and v to the pool, then attend causally.

        `new`: rope.py's Unturned, or NewLatents for MLA. Returns [T, num_heads * head_dim] in q's
        dtype. Query head h reads KV head h // (num_heads // num_kv_heads).
        """


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """Backend for captured steps: it reads no length on the host."""

    def begin_on_device(self, step: DeviceStep | DeviceExtend) -> None:
        """`begin` with tensors only."""

    def parts_bytes(self, rows: int) -> int:
        """Bytes of parts of split contexts in a decode step of `rows`, of one layer at a time."""


def make_attention_backend(name: str, pool: KVPool, *, num_heads: int, needs: Sequence[str] = ()) -> AttentionBackend:
    """Names: auto, cpu, torch, triton, flashinfer. `needs`: the model's. Raises ConfigError."""
    for layer, spec in enumerate(pool.specs):
        if num_heads % spec.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads: {num_heads} is not a multiple of layer {layer}'s {spec.num_kv_heads} kv heads"
            )
    if any(spec.window for spec in pool.specs):
        needs = ("sliding windows", *needs)
    latent = any(spec.latent for spec in pool.specs)
    if latent:
        needs = ("latent attention", *needs)
    if any(spec.index for spec in pool.specs):
        needs = (INDEX, *needs)
    if name == "auto":
        on_gpu = "triton" if find_spec("triton") and not _lacks("triton", needs) else "torch"
        name = "cpu" if pool.device.type == "cpu" else on_gpu
    if lacks := _lacks(name, needs):
        other = "torch" if _lacks("triton", needs) else "triton"
        raise ConfigError(f"--attention-backend {name}: has no {lacks[0]}, which this model needs; choose {other}")
    if name == "torch":
        return _of_latents(pool, None) if latent else TorchBackend(pool)
    return _cpu(pool) if name == "cpu" else _on_gpu(name, pool, num_heads=num_heads)


def _lacks(name: str, needs: Sequence[str]) -> list[str]:
    if name in ("cpu", "torch"):
        return []
    return [need for need in needs if name == "flashinfer" or need in NOT_IN_TRITON]


def _cpu(pool: KVPool) -> AttentionBackend:
    if pool.device.type != "cpu":
        raise ConfigError(f"--attention-backend cpu: the KV cache is on {pool.device}; choose torch or triton")
    if any(spec.latent for spec in pool.specs):
        return _of_latents(pool, make_latent_kernel(pool))
    return CpuBackend(pool)


def _of_latents(pool: KVPool, kernel: LatentKernel | None) -> AttentionBackend:
    if any(spec.index for spec in pool.specs):
        return SparseLatents(pool, kernel)
    return TorchLatents(pool) if kernel is None else CpuLatents(kernel)


def _on_gpu(name: str, pool: KVPool, *, num_heads: int) -> AttentionBackend:
    if pool.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f"--attention-backend {name}: needs a GPU; choose cpu or torch")
    try:
        from engine.attention.triton_backend import TritonBackend, TritonLatents
    except ImportError as e:
        raise ConfigError(f"--attention-backend {name}: {e}; pip install triton, or choose torch") from e
    if any(spec.latent for spec in pool.specs):
        return TritonLatents(pool, num_heads=num_heads)
    return TritonBackend(pool, num_heads=num_heads, prompts=_prompts(pool, num_heads) if name == "flashinfer" else None)


def _prompts(pool: KVPool, num_heads: int) -> FlashInferPrompts:
    check_specs(pool.specs)
    if pool.units > 1:
        raise ConfigError(
            f"--attention-backend flashinfer: reads pages of one unit, not of {pool.units} units (--kv-units); choose triton"
        )
    check_reach(pool)
    return FlashInferPrompts(pool, num_heads=num_heads, wrapper=import_wrapper())


# ---- Models with window layers in their own KV pool: one backend per pool.

Step = TypeVar("Step", bound=StepBatch | DeviceStep | DeviceExtend)


class WindowedBackend:
    """Backends per pool; `full` is None if all layers have windows.

    Kernels read no page before a row's window: the table holds reassigned pages there.
    """

    def __init__(self, full: AttentionBackend | None, windows: AttentionBackend, *, in_window: Sequence[bool]) -> None:
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
        if self._full is not None:
            self._full.begin(step)
        self._windows.begin(_in_windows(step))

    def attend(self, layer: int, new: Any) -> torch.Tensor:
        backend, place = self._places[layer]
        assert backend is not None
        return backend.attend(place, new)


class CapturableWindows(WindowedBackend):
    """Also for captured steps: both backends are CapturableBackends."""

    def begin_on_device(self, step: DeviceStep | DeviceExtend) -> None:
        assert isinstance(self._windows, CapturableBackend)
        if self._full is not None:
            assert isinstance(self._full, CapturableBackend)
            self._full.begin_on_device(step)
        self._windows.begin_on_device(_in_windows(step))

    def parts_bytes(self, rows: int) -> int:
        backends = [one for one in (self._full, self._windows) if isinstance(one, CapturableBackend)]
        return max(one.parts_bytes(rows) for one in backends)


def _in_windows(step: Step) -> Step:
    assert step.windows is not None, "a step of windows knows their pages"
    return replace(step, page_table=step.windows.page_table, token_pages=step.windows.token_pages)


def windowed(full: AttentionBackend | None, windows: AttentionBackend, *, in_window: Sequence[bool]) -> WindowedBackend:
    made = CapturableWindows if isinstance(windows, CapturableBackend) else WindowedBackend
    return made(full, windows, in_window=in_window)
