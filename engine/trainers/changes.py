"""Tensors of an update: read, checked against the checkpoint, kept in memory over it.

All are there before any is used, so an update changes all of them or none.
"""

import hashlib
import os
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from engine.kv.kv_pool import DTYPES
from engine.messages import NewTensors
from engine.model_files.model_config import load_model_config
from engine.model_files.tensor_names import canonical_name
from engine.models.checkpoint import Safetensors, is_derived
from service.flags import ConfigError

# ---- Changed tensors in host memory: unnamed safetensors files, which all ranks of a machine map.
#
# They last while weights are in use, and end with the process.

SAMPLE_BYTES, NUM_SAMPLES = 4096, 64  # of each tensor


class TensorFile:
    """A file of `tensors`, contiguous on the host, by canonical names."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        descriptor = os.memfd_create("tandem-weights")
        weakref.finalize(self, os.close, descriptor)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.digests = {name: _digest(tensor) for name, tensor in tensors.items()}
        with open(self.path, "wb") as file:
            file.write(save(dict(tensors)))


@dataclass(frozen=True, slots=True)
class ChangedTensors:
    """Files over those of a checkpoint; a later one replaces tensors of earlier ones."""

    kept: tuple[TensorFile, ...] = ()

    def with_file(self, new: TensorFile) -> "ChangedTensors":
        """Drop files whose tensors are all replaced."""
        kept, later = [new], set(new.digests)
        for file in reversed(self.kept):
            if not later.issuperset(file.digests):
                kept.append(file)
                later |= file.digests.keys()
        return ChangedTensors(tuple(reversed(kept)))

    @property
    def files(self) -> list[str]:
        return [file.path for file in self.kept]

    @property
    def digest(self) -> str:
        """Equal for equal tensors, however they were divided into files."""
        tensors: dict[str, bytes] = {}
        for file in self.kept:
            tensors |= file.digests
        return hashlib.sha256(b"".join(name.encode() + tensors[name] for name in sorted(tensors))).hexdigest()[:32]


def _digest(tensor: Tensor) -> bytes:
    """Hash shape, dtype and samples of the content, as of checkpoints (engine/kv/kv_pool.py)."""
    content = tensor.reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(f"{list(tensor.shape)} {tensor.dtype}".encode())
    for at in range(0, len(content), max(SAMPLE_BYTES, len(content) // NUM_SAMPLES)):
        digest.update(content[at : at + SAMPLE_BYTES].tobytes())
    return digest.digest()


# ---- Tensors of an update, checked against the checkpoint.

HEAD = "lm_head.weight"


class Receives(Protocol):
    def receive(self, tensors: NewTensors) -> dict[str, Tensor]: ...


class TensorChanges:
    """`dummies`: paths with generated weights; `groups`: of trainers."""

    def __init__(self, groups: Receives, *, dummies: Collection[str] = ()) -> None:
        self._groups = groups
        self._dummies = dummies

    def read(self, current: ChangedTensors | None, model_path: str, tensors: NewTensors) -> ChangedTensors | None:
        """Return `current` with `tensors` over it. Raises ConfigError."""
        found = self._groups.receive(tensors) if tensors.group else _parsed(tensors.data)
        tied = load_model_config(model_path).tie_word_embeddings
        stored = None if model_path in self._dummies else Safetensors(Path(model_path))
        named: dict[str, Tensor] = {}
        for name, tensor in _checked(found, stored, tied=tied):
            if name in named:
                raise ConfigError(f"tensor {name} comes twice, by two of its names")
            named[name] = tensor
        return (current or ChangedTensors()).with_file(TensorFile(named)) if named else current


def _parsed(data: bytes) -> dict[str, Tensor]:
    try:
        return load(data)
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"is not a safetensors file ({error})") from None


def _checked(found: Mapping[str, Tensor], stored: Safetensors | None, *, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield canonical names and tensors. Raises ConfigError."""
    by_file = {} if stored is None else {stored.name_in_file(name): name for name in stored.names()}
    for name, tensor in found.items():
        if _is_left_out(name, tied=tied):
            continue
        own = by_file.get(name) or canonical_name(name)
        if stored is None:
            _check_floats(name, tensor)
        elif own not in stored.names():
            raise ConfigError(f"tensor {name} is not part of the model; names are those of its checkpoint")
        else:
            _check_like(name, tensor, stored.stored(own))
        yield own, tensor.contiguous()


def _is_left_out(name: str, *, tied: bool) -> bool:
    """True for the head of tied embeddings, and for what config.json determines."""
    return is_derived(name) or (tied and canonical_name(name) == HEAD)


def _check_like(name: str, tensor: Tensor, stored: Tensor) -> None:
    """Floats of any width may replace floats."""
    if tensor.shape != stored.shape:
        raise ConfigError(f"tensor {name} has shape {list(tensor.shape)}, the checkpoint's {list(stored.shape)}")
    both = {tensor.dtype, stored.dtype}
    if len(both) > 1 and not both.issubset(DTYPES.values()):
        raise ConfigError(f"tensor {name} is {_name_of(tensor.dtype)}, the checkpoint's {_name_of(stored.dtype)}")


def _check_floats(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES.values():
        raise ConfigError(f"tensor {name} is {_name_of(tensor.dtype)}, and must be of {', '.join(DTYPES)}")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
