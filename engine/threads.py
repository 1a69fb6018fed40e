"""The default of --num-threads on a CPU.

Never torch: OpenMP reads the environment once, when torch is imported, and threads are counted before that.
"""

import math
import os
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.gguf.file import open_gguf

# A thread is worth its meetings with the others (some hundreds a step) when it has a few ms of weights to read between them.
BYTES_A_THREAD = 64 << 20


def with_threads(config: EngineConfig) -> EngineConfig:
    """`num_threads` decided. `config` has its model path."""
    if config.num_threads is not None:
        return config
    return replace(config, num_threads=default_threads(config.model_path, cores=usable_cores()))


def usable_cores() -> int:
    """OMP_NUM_THREADS where the operator has set it, else the cores that this process may run on."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdigit() and int(asked) > 0 else len(os.sched_getaffinity(0))


def default_threads(model_path: str, *, cores: int) -> int:
    """One a core, but no more than the checkpoint's weights are worth; at least 1."""
    return max(1, min(cores, _weight_bytes(Path(model_path)) // BYTES_A_THREAD))


def _weight_bytes(model: Path) -> int:
    """Bytes of weights that a step reads; those of a GGUF file are held as two bytes each, whatever the file has."""
    if model.is_file():
        return sum(2 * math.prod(tensor.shape) for tensor in open_gguf(model).tensors.values())
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
