"""Tensors of an update: read, checked against the checkpoint, kept in memory over it.

An update changes all of them or none.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from engine.kv.kv_pool import DTYPES
from engine.messages import NewTensors
from engine.model_files.model_config import load_model_config
from engine.model_files.tensor_names import canonical_name
from engine.models.checkpoint import Safetensors, is_derived
from engine.trainers.groups import GroupTrainers, TrainerGroups
from engine.trainers.tensor_files import ChangedTensors, TensorFile
from service.flags import ConfigError

HEAD = "lm_head.weight"


class TensorChanges:
    """Reader of `NewTensors`. `dummies`: paths with generated weights; `groups`: of trainers."""

    def __init__(self, groups: TrainerGroups | GroupTrainers, *, dummies: Collection[str] = ()) -> None:
        self._groups = groups
        self._dummies = dummies

    def read(self, current: ChangedTensors | None, model_path: str, tensors: NewTensors) -> ChangedTensors | None:
        """`current` with `tensors` over it. Raises ConfigError."""
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
    """Raises ConfigError."""
    by_file = {} if stored is None else {stored.name_in_file(name): name for name in stored.names()}
    for name, tensor in found.items():
        if _is_left_out(name, tied=tied):
            continue
        own = by_file.get(name) or canonical_name(name)
        if stored is None:
            if tensor.dtype not in DTYPES.values():
                raise ConfigError(f"tensor {name} is {_name_of(tensor.dtype)}, and must be of {', '.join(DTYPES)}")
        elif own not in stored.names():
            raise ConfigError(f"tensor {name} is not part of the model; names are those of its checkpoint")
        else:
            _check_like(name, tensor, stored.stored(own))
        yield own, tensor


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


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
