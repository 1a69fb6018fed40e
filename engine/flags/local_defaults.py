"""Machine-dependent defaults: --num-threads, --random-seed and --tokenizer-worker-num.

Never torch, which reads OpenMP's environment on import.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.config import FRONTENDS_OF_MANY, MANY_RUNNING, MAX_RUNNING_OF, EngineConfig, ServerConfig
from engine.gguf.file import open_gguf
from engine.model_files.model_config import load_model_config
from service.flags import ConfigError
from service.waiter import usable_cores

# A thread needs a few ms of weights to read between two of a step's hundreds of barriers.
BYTES_A_THREAD = 64 << 20
SEED_BITS = 31


def with_frontends(server: ServerConfig, engine: EngineConfig, *, needs_one: bool, on_gpu: bool) -> ServerConfig:
    """Fill in `tokenizer_worker_num`. `engine`: as given; several do not repeat its seed."""
    if server.tokenizer_worker_num is not None:
        return server
    running = engine.dp_size * (engine.max_running_requests or MAX_RUNNING_OF["cuda" if on_gpu else "cpu"])
    many = on_gpu and running >= MANY_RUNNING and not needs_one and engine.random_seed is None
    return replace(server, tokenizer_worker_num=FRONTENDS_OF_MANY if many else 1)


def with_threads(config: EngineConfig) -> EngineConfig:
    if config.num_threads is not None:
        return config
    cores = max(1, usable_cores() // (config.dp_size * config.ranks_here))
    return replace(config, num_threads=default_threads(config.model_path, cores=cores))


def shares_cores(config: EngineConfig) -> bool:
    assert config.num_threads is not None, "prepared"
    ranks = config.dp_size * config.ranks_here
    return ranks > 1 and ranks * config.num_threads > usable_cores()


def default_threads(model_path: str, *, cores: int) -> int:
    """One per core, limited by the weights to read; at least 1."""
    return max(1, min(cores, _weight_bytes(Path(model_path)) // BYTES_A_THREAD))


def _weight_bytes(model: Path) -> int:
    """GGUF weights count two bytes each."""
    if model.is_file():
        return sum(2 * math.prod(tensor.shape) for tensor in open_gguf(model).tensors.values())
    files = list(model.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) if files else _described_bytes(model)


def _described_bytes(model: Path) -> int:
    """Estimate from config.json (dummy weights); 0 if loading will fail."""
    try:
        config = load_model_config(str(model))
    except ConfigError:
        return 0
    mlp = config.hidden_size * round(config.mlp_matrices * config.mlp_width(active=False))
    tables = 2 * config.hidden_size * config.vocab_size
    return 2 * (config.num_layers * (config.attention_weights() + mlp) + tables)


def with_random_seed(config: EngineConfig, bits: Callable[[int], int] = secrets.randbits) -> EngineConfig:
    """Fill in `random_seed` by `bits(k)`; a constant would repeat answers over replicas."""
    return config if config.random_seed is not None else replace(config, random_seed=bits(SEED_BITS))
