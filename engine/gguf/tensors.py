"""GGUF tensors under Hugging Face names, stored or dequantized by `gguf`.

Dequantizes a few rows at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gguf
import numpy as np
import torch

from engine.gguf.file import EMBEDDING, HEAD, ROPE_FACTORS, GGUFFile, TensorInfo, config_fields

ELEMENTS_AT_ONCE = 4 << 20  # 16 MiB of fp32

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}


class GGUFTensors:
    """Loading reports unknown names."""

    described_by = "the metadata"

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._tensors = {hugging_face_name(name): tensor for name, tensor in file.tensors.items()}
        self._tensors.pop(ROPE_FACTORS, None)  # part of the configuration
        self._permuted_heads = _permuted_heads(file)
        self._data = np.memmap(file.path, mode="r", dtype=np.uint8)

    def names(self) -> set[str]:
        return set(self._tensors)

    def where(self, name: str) -> str:
        return str(self._file.path)

    def open(self, name: str, shape: Sequence[int], taken: Sequence[range]) -> Callable[[torch.Tensor], object]:
        """A function that fills in the `taken` part; permuted rows need whole heads."""
        tensor = self._tensor(name, shape)
        return lambda out: self._fill(tensor, out, taken)

    def type_of(self, name: str) -> str:
        return self._tensors[name].storage.name if name in self._tensors else ""

    def blocks(self, name: str, shape: Sequence[int], taken: Sequence[range]) -> tuple[torch.Tensor, slice]:
        """Blocks [rows, n, bytes] uint8 with the `taken` part, and its columns in them."""
        tensor = self._tensor(name, shape)
        of_row, columns = _column_blocks(tensor, taken[1])
        stored = self._data[tensor.start : tensor.start + tensor.size_bytes].reshape(tensor.shape[0], -1)
        blocks = torch.from_numpy(np.array(stored[taken[0].start : taken[0].stop, of_row]))
        place = self._place_of_rows(tensor, taken[0])
        if place is not None:
            blocks = torch.empty_like(blocks).index_copy_(0, place, blocks)
        return blocks.view(len(blocks), -1, tensor.storage.size_bytes), columns

    def close(self) -> None:
        del self._data

    def _tensor(self, name: str, shape: Sequence[int]) -> TensorInfo:
        """Raises ConfigError if missing or of another shape."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self._file.error(f"tensor {name} is missing; download the file again")
        if list(tensor.shape) != list(shape):
            raise self._file.error(
                f"tensor {tensor.name} has shape {list(tensor.shape)}, its metadata asks for {list(shape)}; "
                "convert the model again"
            )
        return tensor

    def _fill(self, tensor: TensorInfo, out: torch.Tensor, taken: Sequence[range]) -> None:
        stored = self._data[tensor.start : tensor.start + tensor.size_bytes]
        own = slice(taken[0].start, taken[0].stop)
        place = self._place_of_rows(tensor, taken[0])
        if len(tensor.shape) == 1:
            _put(out, slice(None) if place is None else place, _dequantized(stored, tensor)[own])
            return
        blocks, columns = _column_blocks(tensor, taken[1])
        stored = stored.reshape(tensor.shape[0], -1)[own, blocks]
        step = max(1, ELEMENTS_AT_ONCE // len(taken[1]))
        for begin in range(0, len(taken[0]), step):
            rows = slice(begin, begin + step)
            _put(out, rows if place is None else place[rows], _dequantized(stored[rows], tensor)[:, columns])

    def _place_of_rows(self, tensor: TensorInfo, taken: range) -> torch.Tensor | None:
        """Hugging Face row of each taken row, None if equal.

        ggml's Llama rotates neighbours (2j, 2j + 1), we rotate (j, j + D/2), so converters permute
        q and k (convert_hf_to_gguf.py: LlamaModel.permute).
        """
        parts = tensor.name.split(".")
        heads = self._permuted_heads.get(parts[2]) if len(parts) == 4 else None
        if heads is None:
            return None
        assert taken.start % (tensor.shape[0] // heads) == len(taken) % (tensor.shape[0] // heads) == 0, (heads, taken)
        place = torch.arange(tensor.shape[0]).view(heads, 2, -1).transpose(1, 2).reshape(-1)
        return place[taken.start : taken.stop] - taken.start


def _permuted_heads(file: GGUFFile) -> dict[str, int]:
    if file.metadata.get("general.architecture") != "llama":
        return {}
    fields = config_fields(file)
    return {"attn_q": int(fields["num_attention_heads"]), "attn_k": int(fields["num_key_value_heads"])}


def _column_blocks(tensor: TensorInfo, taken: range) -> tuple[slice, slice]:
    elements, size_bytes = tensor.storage.elements, tensor.storage.size_bytes
    first, end = taken.start // elements, -(-taken.stop // elements)
    begin = first * elements
    return slice(first * size_bytes, end * size_bytes), slice(taken.start - begin, taken.stop - begin)


def _dequantized(stored: np.ndarray[Any, np.dtype[np.uint8]], tensor: TensorInfo) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[tensor.storage.name]
    values = gguf.quants.dequantize(np.ascontiguousarray(stored), kind)
    return torch.from_numpy(np.array(values, dtype=np.float32, copy=None if values.flags.writeable else True))


def _put(out: torch.Tensor, rows: slice | torch.Tensor, values: torch.Tensor) -> None:
    out[rows if isinstance(rows, slice) else rows.to(out.device)] = values.to(out)


def hugging_face_name(name: str) -> str:
    """Such as "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"."""
    prefix, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    part, _, end = rest.rpartition(".")
    if prefix == "blk" and index.isdigit() and part in _LAYER:
        return f"model.layers.{index}.{_LAYER[part]}.{end}"
    return _WHOLE.get(name, name)
