"""A GGUF file of a Hugging Face checkpoint, written by the `gguf` package as llama.cpp's converter writes it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# A file without merges has no tokenizer. Its one merge, and what that is made of, take the places of tokens that may go.
MERGE, PARTS = "! !", {14: "!", 15: "!!"}

Edit = Callable[[gguf.GGUFWriter], object]


def write_gguf(
    checkpoint: Path,
    path: Path,
    kind: str = "F32",
    *,
    edit: Edit | None = None,
    seed: int = 0,
    kinds: Mapping[str, Kind] | None = None,
) -> dict[str, torch.Tensor]:
    """Write `path` with matrices of type `kind`; return the values that its tensors stand for, by their names in the checkpoint.

    `edit` adds metadata or tensors. `kinds`: of matrices whose names contain the key. k-quants are random, by `seed`. A tokenizer of
    whole words keeps its tokens, but cuts no text.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    _add_config(writer, config)
    add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()))
    weights = load_file(checkpoint / "model.safetensors")
    written = _add_tensors(writer, config, weights, kind, seed, kinds or {})
    if edit is not None:
        edit(writer)
    write(writer)
    return written


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], *, pre: str = "gpt-2") -> None:
    """Byte-level BPE of a tokenizer.json."""
    ids: dict[str, int] = tokenizer["model"]["vocab"]
    added = {token["content"]: token for token in tokenizer["added_tokens"]}
    ids = ids | {name: token["id"] for name, token in added.items()}
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds = [1 if t not in added else 3 if added[t]["special"] else 4 for t in tokens]
    merges = tokenizer["model"].get("merges")
    if not merges:
        for token_id, token in PARTS.items():
            tokens[token_id], kinds[token_id] = token, 1
        merges = [MERGE]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_bos_token_id(config["bos_token_id"])
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    scaling = config.get("rope_scaling")
    if scaling and scaling["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(scaling, theta=config["rope_theta"], dim=head_dim))
    elif scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _llama3_factors(scaling: dict[str, Any], *, theta: float, dim: int) -> "np.ndarray[Any, Any]":
    """As convert_hf_to_gguf.py computes them."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    context = scaling["original_max_position_embeddings"]
    factors = []
    for frequency in 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim):
        wavelength = 2 * np.pi / float(frequency)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def _add_tensors(
    writer: gguf.GGUFWriter,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    kind: str,
    seed: int,
    kinds: Mapping[str, Kind],
) -> dict[str, torch.Tensor]:
    """The values that were written, by their Hugging Face names."""
    arch = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[config["model_type"]])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    rng = np.random.default_rng(seed)
    written = {}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        heads = _heads_to_permute(config, name)
        if heads:
            values = _permuted(values, heads)
        own = next((other for key, other in kinds.items() if key in name), Kind[kind])
        stored, type_ = _stored(values, own if values.ndim > 1 else Kind.F32, rng)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), stored, raw_dtype=type_)
        exact = gguf.quants.dequantize(stored.view(np.uint8) if type_ == Kind.BF16 else stored, type_)
        exact = exact.astype(np.float32).reshape(values.shape)
        written[name] = torch.from_numpy(_unpermuted(exact, heads) if heads else exact).contiguous()
    return written


def _heads_to_permute(config: dict[str, Any], name: str) -> int:
    if ARCHITECTURES[config["model_type"]] != "llama":
        return 0
    part = name.split(".")[-2]
    return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(part, 0)


def _permuted(values: "np.ndarray[Any, Any]", heads: int) -> "np.ndarray[Any, Any]":
    """convert_hf_to_gguf.py: LlamaModel.permute."""
    return np.ascontiguousarray(
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def _unpermuted(values: "np.ndarray[Any, Any]", heads: int) -> "np.ndarray[Any, Any]":
    return np.ascontiguousarray(
        values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def _stored(
    values: "np.ndarray[Any, Any]", kind: Kind, rng: np.random.Generator
) -> "tuple[np.ndarray[Any, Any], Kind]":
    if kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        return _random_blocks(values.shape, kind, rng), kind
    return gguf.quants.quantize(values, kind), kind


def _random_blocks(shape: tuple[int, ...], kind: Kind, rng: np.random.Generator) -> "np.ndarray[Any, Any]":
    """`gguf` cannot write k-quants, so any bytes are taken, with scales (f16) that make the values about 0.2 wide."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), dtype=np.uint8)
    scale = np.array([0.0001 if kind == Kind.Q6_K else 0.0006], dtype=np.float16).view(np.uint8)
    if kind == Kind.Q6_K:
        blocks[..., -2:] = scale
    else:
        blocks[..., 0:2] = scale
        blocks[..., 2:4] = np.array([0.005], dtype=np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
