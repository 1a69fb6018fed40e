"""GGUF metadata as config.json fields."""

import struct
from typing import Any

from engine.gguf.ends import end_ids
from engine.gguf.file import GGUFFile

# general.architecture -> class in engine.model_files.families.FAMILIES. Mistral models are "llama",
# too.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1: a divisor per pair of a head
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def config_fields(file: GGUFFile) -> dict[str, Any]:
    """Raises ConfigError."""
    name = file.value("general.architecture", str, "")
    if name not in ARCHITECTURES:
        raise file.error(
            f"general.architecture is {name!r}, which is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    keys = _Keys(file, name)
    if keys.get("expert_count", 0):
        raise file.error(f"{name}.expert_count: mixture-of-experts models are not supported; take a dense one")
    if EMBEDDING not in file.tensors:
        raise file.error(f"tensor {EMBEDDING} is missing; is this a whole model? download it again")
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    if _rotary_share(keys, heads=heads, hidden=hidden) != 1.0:
        raise file.error(
            f"{name}.rope.dimension_count: partial RoPE is not supported in GGUF files; take the checkpoint"
        )
    return {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "hidden_size": hidden,
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": keys.get("attention.key_length"),
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.need("context_length"),
        "tie_word_embeddings": HEAD not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": _rope(keys, file),
        "dtype": stored_dtype(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(file),
    }


def stored_dtype(file: GGUFFile) -> str:
    """The matrices' dtype; quantized ones count as bfloat16."""
    kinds = {tensor.storage.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


def _rope(keys: "_Keys", file: GGUFFile) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": keys.get("rope.freq_base", 10000.0), "rope_type": "default"}
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor")
    if keys.get("rope.scale_linear", 1.0) != 1.0:
        kind, factor = "linear", keys.get("rope.scale_linear")
    if kind == "none" or factor == 1.0:
        return rope | _rope_factors(file)
    original = keys.get("rope.scaling.original_context_length")
    return rope | {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}


def _rope_factors(file: GGUFFile) -> dict[str, Any]:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return {}
    if tensor.storage.name != "F32" or len(tensor.shape) != 1:
        raise file.error(f"tensor {ROPE_FACTORS} must be one row of F32; convert the model again")
    with file.path.open("rb") as opened:
        opened.seek(tensor.start)
        raw = opened.read(tensor.size_bytes)
    return {"rope_type": "factors", "factors": list(struct.unpack(f"<{tensor.shape[0]}f", raw))}


def _rotary_share(keys: "_Keys", *, heads: Any, hidden: Any) -> float:
    turned = keys.get("rope.dimension_count")
    if not all(isinstance(value, int) and value > 0 for value in (turned, heads, hidden)):
        return 1.0
    dim = keys.get("attention.key_length", hidden // heads)
    return float(turned / dim) if isinstance(dim, int) and dim > 0 else 1.0  # their reader checks the fields


class _Keys:
    """Metadata of one architecture: `need("block_count")` reads "llama.block_count"."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._prefix = architecture

    def get(self, name: str, default: Any = None) -> Any:
        """Get a value, or the equal value of all layers."""
        value = self._file.metadata.get(f"{self._prefix}.{name}", default)
        return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise self._file.error(f"metadata {self._prefix}.{name} is missing; convert the model again")
        return value
