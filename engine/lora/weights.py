"""Reads adapter_model.safetensors, checked against the model. Never unpickles.

A rank takes columns of A where its matrix is cut by columns, rows of B where by rows, so
all-reduces add the adapter once.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.kv.kv_pool import DTYPES
from engine.layers.linear import SiteShape
from engine.lora.peft_config import PeftConfig, read_peft_config
from engine.model_files.tensor_names import is_multimodal, text_name
from engine.parallel.layout import cut_of
from service.flags import ConfigError

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
_TENSOR = re.compile(r"base_model\.model\.(?P<matrix>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class SiteWeights:
    """y[:, columns] += (x A^T)[:, ranks] B^T for each of `parts` of a site.

    `a`: [sum of ranks, in]. `parts`: (columns of y, ranks of x A^T, scaled B^T [rank, columns]).
    """

    a: Tensor
    parts: tuple[tuple[slice, slice, Tensor], ...]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """`sites`: parallel to the model's; None if unchanged. `digest`: of the whole adapter."""

    sites: tuple[SiteWeights | None, ...]
    max_rank: int
    digest: str

    @property
    def num_bytes(self) -> int:
        tensors = [t for s in self.sites if s is not None for t in (s.a, *(b for _, _, b in s.parts))]
        return sum(t.numel() * t.element_size() for t in tensors)


def read_adapter(
    path: str,
    sites: Sequence[SiteShape],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_rank: int | None = None,
    elsewhere: Sequence[SiteShape] = (),
) -> AdapterWeights:
    """Read PEFT directory `path` for a model with `sites`. Raises ConfigError of one line.

    `elsewhere`: sites of other stages, so that all ranks reject the same adapters.
    """
    folder = Path(path)
    config = read_peft_config(folder)
    file = folder / WEIGHTS_FILE
    known = {
        name: (cut_of(rows).total, cut_of(site.in_size).total)
        for site in (*sites, *elsewhere)
        for name, rows in site.parts
    }
    with torch.inference_mode():
        pairs = _read_pairs(file, known, config)
        ranks = [pair.a.shape[0] for pair in pairs.values()]
        if max_rank is not None and max(ranks) > max_rank:
            raise ConfigError(f"{file}: has rank {max(ranks)}, more than --max-lora-rank {max_rank}; raise that")
        made = tuple(_site_weights(site, pairs, dtype=dtype, device=device) for site in sites)
        return AdapterWeights(made, max(ranks), _digest(pairs))


@dataclass(frozen=True, slots=True)
class _Pair:
    """A [rank, in], B [rows, rank]."""

    a: Tensor
    b: Tensor
    scale: float


def _digest(pairs: Mapping[str, _Pair]) -> str:
    """SHA-256, as equal digests share KV."""
    found = hashlib.sha256()
    for name in sorted(pairs):
        a, b, scale = pairs[name].a, pairs[name].b, pairs[name].scale
        found.update(f"{name} {scale} {a.dtype} {tuple(a.shape)} {b.dtype} {tuple(b.shape)}".encode())
        for half in (a, b):
            found.update(half.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _read_pairs(file: Path, known: Mapping[str, tuple[int, int]], config: PeftConfig) -> dict[str, _Pair]:
    """Config patterns match names in the file."""
    halves: dict[str, dict[str, Tensor]] = {}
    with _open(file) as tensors:
        for name in sorted(tensors.keys()):
            stored, side = _matrix_of(file, name, known)
            halves.setdefault(stored, {})[side] = _read(file, tensors, name)
    if not halves:
        raise ConfigError(f"{file}: holds no tensor; export the adapter again")
    pairs: dict[str, _Pair] = {}
    for stored, half in halves.items():
        matrix = text_name(stored)
        if matrix in pairs:
            raise ConfigError(f"{file}: changes {matrix} under two names; export the adapter again")
        _check_pair(file, stored, half, rank=config.rank_of(stored), shape=known[matrix])
        pairs[matrix] = _Pair(half["A"], half["B"], config.scale_of(stored))
    return pairs


def _matrix_of(file: Path, name: str, known: Mapping[str, tuple[int, int]]) -> tuple[str, str]:
    """(matrix name, "A" or "B"). Raises ConfigError if unsupported."""
    match = _TENSOR.fullmatch(name)
    if match is not None and is_multimodal(match["matrix"]):
        raise ConfigError(
            f"{file}: tensor {name} changes the vision tower; train the adapter on the language model alone"
        )
    if match is None or text_name(match["matrix"]) not in known:
        raise ConfigError(f"{file}: tensor {name} changes nothing that this model has and adapters may change")
    return match["matrix"], match["side"]


def _check_pair(file: Path, matrix: str, half: dict[str, Tensor], *, rank: int, shape: tuple[int, int]) -> None:
    rows, columns = shape
    for side, wanted in (("A", [rank, columns]), ("B", [rows, rank])):
        if side not in half:
            raise ConfigError(f"{file}: {matrix} has no lora_{side}; export the adapter again")
        found = list(half[side].shape)
        if found != wanted:
            raise ConfigError(
                f"{file}: lora_{side} of {matrix} has shape {found}, model and adapter_config.json ask for {wanted}; "
                "is it an adapter of this model?"
            )


def _site_weights(
    site: SiteShape,
    pairs: Mapping[str, _Pair],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> SiteWeights | None:
    parts, sides, column, rank = [], [], 0, 0
    inputs = cut_of(site.in_size).taken
    for (name, extent), rows in zip(site.parts, site.rows, strict=True):
        if name in pairs:
            pair, own = pairs[name], cut_of(extent).taken
            a, b = pair.a[:, inputs.start : inputs.stop], pair.b[own.start : own.stop]
            if site.row_order is not None:
                b = b[[row - column for row in site.row_order[column : column + rows]]]
            scaled = (b.float() * pair.scale).t().to(dtype=dtype, device=device).contiguous()
            parts.append((slice(column, column + rows), slice(rank, rank + a.shape[0]), scaled))
            sides.append(a.to(dtype))
            rank += a.shape[0]
        column += rows
    return SiteWeights(torch.cat(sides).to(device), tuple(parts)) if parts else None


def _open(file: Path) -> Any:
    if not file.is_file() and (file.parent / PICKLE_FILE).is_file():
        raise ConfigError(f"{file.parent}: has {PICKLE_FILE} only, which is never read; save it as safetensors")
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: is not a readable safetensors file ({error}); export the adapter again") from None


def _read(file: Path, tensors: Any, name: str) -> Tensor:
    try:
        tensor: Tensor = tensors.get_tensor(name)
    except (SafetensorError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{file}: tensor {name} cannot be read: {error}; export the adapter again") from None
    if tensor.dtype not in DTYPES.values():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ConfigError(f"{file}: tensor {name} is {kind}; supported: {', '.join(DTYPES)}")
    if not tensor.isfinite().all():
        raise ConfigError(f"{file}: tensor {name} holds values that are no numbers (NaN or infinity)")
    return tensor
