"""Changed tensors in host memory: unnamed safetensors files, which all ranks of a machine map.

They last while weights are in use, and end with the process.
"""

import hashlib
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import save
from torch import Tensor

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
