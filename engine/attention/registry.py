"""Chooses an attention backend by name, and imports no other one (triton may be missing)."""

import os
from importlib.util import find_spec

from engine.attention.base import AttentionBackend
from engine.attention.torch_backend import TorchBackend
from engine.kv.kv_pool import KVPool
from service.flags import ConfigError


def make_attention_backend(name: str, pool: KVPool, *, num_heads: int, scale: float | None = None) -> AttentionBackend:
    """`name`: auto | cpu | torch | triton. `num_heads`: query heads; `scale`: of q.k, default head_dim ** -0.5.

    Raises ConfigError when the backend cannot work with the pool's device or with these heads.
    """
    _check_heads(pool, num_heads)
    if name == "auto":
        name = "cpu" if pool.device.type == "cpu" else _best_gpu_backend()
    if name == "torch":
        return TorchBackend(pool, scale=scale)
    if name == "cpu":
        return _cpu(pool, scale)
    if name == "triton":
        return _triton(pool, scale)
    raise ConfigError(f"--attention-backend: unknown backend {name!r}; choose auto, cpu, torch or triton")


def _check_heads(pool: KVPool, num_heads: int) -> None:
    for layer, spec in enumerate(pool.specs):
        if num_heads % spec.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads: {num_heads} is not a multiple of layer {layer}'s {spec.num_kv_heads} kv heads"
            )


def _best_gpu_backend() -> str:
    return "triton" if find_spec("triton") else "torch"


def _cpu(pool: KVPool, scale: float | None) -> AttentionBackend:
    if pool.device.type != "cpu":
        raise ConfigError(f"--attention-backend cpu: the KV cache is on {pool.device}; choose torch or triton")
    from engine.attention.cpu_backend import CpuBackend

    return CpuBackend(pool, scale=scale)


def _triton(pool: KVPool, scale: float | None) -> AttentionBackend:
    if pool.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("--attention-backend triton: needs a GPU; choose cpu or torch")
    try:
        from engine.attention.triton_backend import TritonBackend
    except ImportError as e:
        raise ConfigError(f"--attention-backend triton: {e}; pip install triton, or choose torch") from e
    return TritonBackend(pool, scale=scale)
