"""The model configuration of a checkpoint, checked and frozen. Never torch: the frontend imports it.

Field names are those of transformers 4 and 5 (config.json, generation_config.json); engine/gguf translates GGUF files.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.gguf.config import config_fields
from engine.gguf.file import open_gguf
from engine.model_files.fields import Fields, read_fields
from service.flags import ConfigError

DEFAULT_MODEL_PATH = str(Path(__file__).parents[1] / "models" / "recall" / "checkpoint")
WIDE_MODEL_PATH = str(Path(__file__).parents[1] / "models" / "recall" / "wide")

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes that its config.json does not say.

    qkv_bias:       q, k, v have a bias (None: `attention_bias` in the config decides, for q, k, v and o alike)
    qk_norm:        RMSNorm over head_dim on q and k
    gated_window:   `sliding_window` counts only where `use_sliding_window` is set
    default_window: the window where the config says nothing
    """

    qkv_bias: bool | None
    qk_norm: bool
    gated_window: bool = False
    default_window: int | None = None


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias=None, qk_norm=False),
    "MistralForCausalLM": Family(qkv_bias=False, qk_norm=False, default_window=4096),
    "Qwen2ForCausalLM": Family(qkv_bias=True, qk_norm=False, gated_window=True),
    "Qwen3ForCausalLM": Family(qkv_bias=None, qk_norm=True, gated_window=True),
}


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1 RoPE: long wavelengths are divided by `factor`, short ones kept, the middle interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """RoPE whose pair i turns `factors[i]` times slower: Llama 3.1's scaling in GGUF files."""

    factors: tuple[float, ...]


RopeScaling = Llama3Scaling | FrequencyFactors


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model. Sizes in elements; `max_position_embeddings` in tokens.

    `attention_bias`: q, k and v have a bias; `attention_out_bias`: o has one too. `dtype`: of the stored weights.
    `eos_token_ids`: of both files, ascending. `rope_scaling`: None is plain RoPE. `sliding_window`: None, or at least the
    context, so that it never cuts.
    """

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    sliding_window: int | None
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def signature(self) -> str:
        """What prefill and decode must agree on: "Qwen3ForCausalLM/L2/kv1x128/V528/1f2e3d4c5b6a".

        The tail hashes every field that changes the numbers.
        """
        silent = {"dtype", "max_position_embeddings", "sliding_window", "bos_token_id", "eos_token_ids", "model_type"}
        fields = {name: value for name, value in asdict(self).items() if name not in silent}
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]
        return (
            f"{self.architecture}/L{self.num_layers}/kv{self.num_kv_heads}x{self.head_dim}/V{self.vocab_size}/{digest}"
        )


def load_model_config(model_path: str) -> ModelConfig:
    """Read and check the configuration of `model_path`, a directory or a GGUF file. Raises ConfigError."""
    path = Path(model_path)
    if path.is_dir():
        return _model_config(
            read_fields(path / "config.json", required=True),
            read_fields(path / "generation_config.json", required=False),
        )
    if path.is_file():
        return _model_config(Fields(path, config_fields(open_gguf(path))), Fields(path, {}))
    raise ConfigError(
        f"--model-path {model_path}: no such directory or file; give a checkpoint directory, a .gguf file, "
        "a model of the Hugging Face hub (ORGANIZATION/NAME), smollm2, or recall-wide"
    )


def _model_config(fields: Fields, generation: Fields) -> ModelConfig:
    family_name, family = _family(fields)
    _refuse_unsupported(fields)
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    hidden = fields.count("hidden_size")
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.error("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}; set head_dim")
    head_dim = fields.count("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd; RoPE needs pairs")
    vocab = fields.count("vocab_size")
    context = fields.count("max_position_embeddings")
    bias = fields.flag("attention_bias", default=False) if family.qkv_bias is None else family.qkv_bias
    theta, scaling = _rope(fields, context=context, pairs=head_dim // 2)
    return ModelConfig(
        architecture=family_name,
        model_type=fields.text("model_type", default=""),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention_bias=bias,
        attention_out_bias=bias and family.qkv_bias is None,
        qk_norm=family.qk_norm,
        max_position_embeddings=context,
        sliding_window=_window(fields, family=family, context=context),
        dtype=_dtype(fields),
        bos_token_id=next(iter(_token_ids(fields, "bos_token_id", vocab=vocab)), None),
        eos_token_ids=tuple(
            sorted(
                {*_token_ids(fields, "eos_token_id", vocab=vocab), *_token_ids(generation, "eos_token_id", vocab=vocab)}
            )
        ),
    )


def _family(fields: Fields) -> tuple[str, Family]:
    names = fields.get("architectures")
    known = ", ".join(sorted(FAMILIES))
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise fields.error("architectures", f"must name the model class; supported: {known}")
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    raise fields.error("architectures", f"{names[0]} is not supported; supported: {known}")


def _refuse_unsupported(fields: Fields) -> None:
    if fields.get("quantization_config"):
        raise fields.error("quantization_config", "quantized checkpoints are not supported; use a bf16 or fp32 one")
    if fields.text("hidden_act", default="silu") != "silu":
        raise fields.error("hidden_act", f"{fields.get('hidden_act')} is not supported; only silu is")
    if fields.flag("mlp_bias", default=False):
        raise fields.error("mlp_bias", "a bias in the MLP is not supported")


def _rope(fields: Fields, *, context: int, pairs: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4)."""
    new = fields.get("rope_parameters")
    name = "rope_parameters" if new else "rope_scaling"
    inner = fields.inside(name)
    theta = inner.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    if theta <= 0:
        raise fields.error("rope_theta", f"must be positive, got {theta:g}")
    if inner.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0)) != 1.0:
        raise fields.error("partial_rotary_factor", "partial RoPE is not supported; only 1.0 is")
    kind = inner.text("rope_type", default=inner.text("type", default="default"))
    if kind == "default":
        return theta, None
    if kind == "factors":
        return theta, FrequencyFactors(inner.positive_numbers("factors", count=pairs))
    if kind != "llama3":
        raise fields.error(name, f"rope_type {kind} is not supported; supported: default, llama3")
    scaling = Llama3Scaling(
        factor=inner.number("factor"),
        low_freq_factor=inner.number("low_freq_factor"),
        high_freq_factor=inner.number("high_freq_factor"),
        original_max_position_embeddings=inner.count("original_max_position_embeddings", default=context),
    )
    if min(scaling.factor, scaling.low_freq_factor) <= 0 or scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.error(name, "llama3 needs factor > 0 and 0 < low_freq_factor < high_freq_factor")
    return theta, scaling


def _window(fields: Fields, *, family: Family, context: int) -> int | None:
    if family.gated_window and not fields.flag("use_sliding_window", default=False):
        return None
    window = fields.get("sliding_window", family.default_window)
    if window is None:
        return None
    window = fields.count("sliding_window", default=family.default_window)
    if window < context:
        raise fields.error(
            "sliding_window",
            f"{window} is below max_position_embeddings {context}, and sliding-window attention is not supported; "
            f"use a checkpoint without it, or lower max_position_embeddings to {window}",
        )
    return window


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.text(name, default="float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.error(name, f"{dtype} is not supported; supported: {', '.join(DTYPES)}")
    return dtype


def _token_ids(fields: Fields, name: str, *, vocab: int) -> list[int]:
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise fields.error(name, f"{token!r} is not a token id (0 to {vocab - 1})")
    return ids
