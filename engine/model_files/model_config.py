"""The checked, frozen model configuration.

Field names are those of transformers 4 and 5; engine/gguf translates GGUF files.
"""

import hashlib
import itertools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.model_files.directory import GGUFFolder, ModelDirectory, check_gguf, check_pipeline, open_directory
from engine.model_files.experts_config import ExpertsConfig
from engine.model_files.families import RopeFamily
from engine.model_files.fields import PLAIN, Arithmetic, Fields
from engine.model_files.head_config import TOKEN_HEAD, TOKENS, HeadConfig, read_family, read_head
from engine.model_files.latent_config import LatentConfig, read_latent, rope_dim
from engine.model_files.recurrent_config import RecurrentConfig
from engine.model_files.rope_config import RopeConfig, read_kinds, read_ropes, read_windows, scaled_context
from engine.model_files.stored_weights import StoredWeights, read_stored_weights
from engine.model_files.vision_config import VisionConfig, read_vision, text_part

if TYPE_CHECKING:
    from engine.model_files.drafter_config import DrafterConfig

DEFAULT_MODEL_PATH = str(Path(__file__).parents[1] / "models" / "recall" / "checkpoint")
WIDE_MODEL_PATH = str(Path(__file__).parents[1] / "models" / "recall" / "wide")

MOST_LAYERS = 10_000  # per-layer facts are kept in lists
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Attention of all layers. `Family` defines `qk_norm`, `fused_qkv`, `attention_gate`.

    `attention_bias`: of q, k, v; `attention_out_bias`: of o. `latent`: MLA; then `num_kv_heads` is
    1 and `head_dim` the cached elements of a token. `layer_ropes`: per layer, None without RoPE;
    empty if all have `rope`. `windows`: per layer in tokens, 0 for full; empty if none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    attention_bias: bool
    attention_out_bias: bool
    qk_norm: str
    fused_qkv: bool
    latent: LatentConfig | None
    windows: tuple[int, ...]
    attention_gate: bool = False

    def rope_of(self, layer: int) -> RopeConfig | None:
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def pair_flops(self) -> int:
        """FLOPs of a layer for one query and one key."""
        if self.latent is not None:
            return 2 * self.num_heads * (self.latent.read_dim + self.latent.rank)
        return 4 * self.num_heads * self.head_dim

    def attended_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(AttentionConfig):
    """A decoder-only model. `Family` defines `norms`, `fused_mlp`.

    `max_position_embeddings`: tokens, including RoPE scaling. `dtype`: of the files.
    `eos_token_ids`: of all files, ascending. `quantization`: name, empty for float; `stored`:
    format in the files. `nextn_layers`: MTP layers.
    """

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    norms: str
    fused_mlp: bool
    head: HeadConfig = TOKEN_HEAD
    arithmetic: Arithmetic = PLAIN
    experts: ExpertsConfig | None
    max_position_embeddings: int
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    recurrent: RecurrentConfig | None = None
    quantization: str = ""
    stored: StoredWeights | None = None
    nextn_layers: int = 0
    drafter: "DrafterConfig | None" = None
    vision: VisionConfig | None = None

    @property
    def generates(self) -> bool:
        return self.head.kind == TOKENS

    def attention_needs(self) -> tuple[str, ...]:
        has = {"softcaps of scores": self.arithmetic.score_cap, "attention sinks": self.arithmetic.sinks}
        return tuple(name for name, there in has.items() if there)

    def is_dense(self, layer: int) -> bool:
        return self.experts is None or layer in self.experts.dense_layers

    @property
    def deepstack_levels(self) -> int:
        return 0 if self.vision is None else self.vision.deepstack_levels

    def has_kv(self, layer: int) -> bool:
        recurrent = self.recurrent
        return recurrent is None or recurrent.beside_attention or layer not in recurrent.layers

    def kv_layers(self, layers: range) -> range:
        """The KV layers of `layers`, numbered among all KV layers."""
        first = sum(map(self.has_kv, range(layers.start)))
        return range(first, first + sum(map(self.has_kv, layers)))

    def state_layers(self, layers: range) -> range:
        places = () if self.recurrent is None else self.recurrent.layers
        first = sum(layer < layers.start for layer in places)
        return range(first, first + sum(layer in layers for layer in places))

    def recurrent_sizes(self) -> dict[str, int]:
        return {} if self.recurrent is None else self.recurrent.sizes()

    def mlp_sizes(self) -> dict[str, int]:
        experts = self.experts
        if experts is None:
            return {"intermediate_size": self.intermediate_size}
        sizes = {"experts' intermediate_size": experts.intermediate}
        if experts.shared_intermediate:
            sizes["shared expert's intermediate_size"] = experts.shared_intermediate
        return sizes | ({"intermediate_size": self.intermediate_size} if experts.dense_layers else {})

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.arithmetic.is_gated else 2

    def mlp_width(self, *, active: bool) -> float:
        """Mean intermediate size of layers; `active`: of experts a token takes."""
        experts = self.experts
        if experts is None:
            return self.intermediate_size
        sparse = (experts.per_token if active else experts.count) * experts.intermediate + experts.shared_intermediate
        num_dense = len(experts.dense_layers)
        return (num_dense * self.intermediate_size + (self.num_layers - num_dense) * sparse) / self.num_layers

    def attention_weights(self) -> int:
        if self.latent is not None:
            return self.latent.weights(hidden=self.hidden_size, heads=self.num_heads)
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    def quantized(self, scheme: str | None) -> "ModelConfig":
        return replace(self, quantization="+".join(filter(None, (self.quantization, scheme))))

    def signature(self) -> str:
        """The signature on which prefill and decode must agree.

        "Qwen3ForCausalLM/L2/kv1x128/V528/1f2e3d4c5b6a": the hash covers fields that change numbers;
        quantization and drafter follow.
        """
        silent = {
            "dtype",
            "max_position_embeddings",
            "bos_token_id",
            "eos_token_ids",
            "model_type",
            "quantization",
            "stored",
            "nextn_layers",
            "drafter",
        }
        if self.vision is None:
            silent.add("vision")
        fields = {name: value for name, value in asdict(replace(self, drafter=None)).items() if name not in silent}
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]
        return (
            f"{self.architecture}/L{self.num_layers}/kv{self.num_kv_heads}x{self.head_dim}/V{self.vocab_size}/{digest}"
            + (f"/{self.quantization}" if self.quantization else "")
            + (f"/drafts by {self.drafter.signature()}" if self.drafter else "")
        )


def load_model_config(model: str | Path | ModelDirectory, *, architecture: str = "") -> ModelConfig:
    """Read a directory or GGUF file; `architecture` overrides its own. Raises ConfigError."""
    folder = open_directory(model)
    if isinstance(folder, GGUFFolder):
        check_gguf(folder.path, folder.file.value("general.architecture", str, ""))
    else:
        check_pipeline(folder.path)
    fields = folder.config
    return _model_config(folder, fields.with_values(architectures=[architecture]) if architecture else fields)


def _model_config(folder: ModelDirectory, fields: Fields) -> ModelConfig:
    whole, fields = fields, text_part(fields)
    name, family, kind = read_family(fields)
    fields = fields.with_defaults(family.defaults)
    if fields.flag("mlp_bias", default=False):
        raise fields.error("mlp_bias", "a bias in the MLP is not supported")
    stored = read_stored_weights(fields, mxfp4=family.mxfp4)
    arithmetic = family.arithmetic(fields)
    if family.experts is not None and arithmetic.activation != "silu":
        raise fields.error("hidden_act", f"{fields.get('hidden_act')} is not supported in experts; only silu is")
    heads = fields.count("num_attention_heads")
    num_layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
    hidden = fields.count("hidden_size")
    kv_heads, head_dim = (1, rope_dim(fields)) if family.latent else _kv_heads(fields, heads=heads, hidden=hidden)
    vocab = fields.count("vocab_size")
    trained = fields.count("max_position_embeddings")
    context = _context(fields, trained, family)
    if (bias := family.qkv_bias) is None:
        bias = fields.flag("attention_bias", default=family.default_bias)
    kinds = read_kinds(fields, family=family, num_layers=num_layers)
    rope, layer_ropes = read_ropes(fields, kinds, family=family, context=trained, head_dim=head_dim)
    latent = read_latent(fields, rope, family) if family.latent else None
    experts = None if family.experts is None else family.experts(fields, num_layers)
    unused_size = None if experts is None or experts.dense_layers else experts.intermediate
    return ModelConfig(
        architecture=name,
        model_type=fields.text("model_type", default=""),
        hidden_size=hidden,
        intermediate_size=fields.count(family.mlp.width, default=unused_size),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim if latent is None else latent.width,
        vocab_size=vocab,
        rms_norm_eps=fields.number(family.eps[0], default=family.eps[1]),
        rope=rope,
        layer_ropes=layer_ropes,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention_bias=bias,
        attention_out_bias=bias and family.out_bias,
        qk_norm="head" if family.qk_norm_flag and fields.flag("use_qk_norm", default=False) else family.qk_norm,
        norms=family.norms,
        fused_qkv=family.fused_qkv,
        fused_mlp=family.fused_mlp,
        head=read_head(fields, kind, folder=folder.path),
        arithmetic=arithmetic,
        latent=latent,
        experts=experts,
        recurrent=None if family.recurrent is None else family.recurrent(fields, num_layers),
        attention_gate=family.attention_gate,
        quantization="" if stored is None else str(stored),
        stored=stored,
        max_position_embeddings=context,
        windows=read_windows(fields, kinds, family=family, context=context),
        nextn_layers=_nextn_layers(fields, default=family.nextn.default),
        vision=read_vision(whole, fields, rope=rope, num_layers=num_layers, folder=folder.path),
        dtype=_dtype(fields),
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab=vocab)), None),
        eos_token_ids=_ends(folder, whole, fields, vocab=vocab),
    )


def _context(fields: Fields, trained: int, family: RopeFamily) -> int:
    """`model_max_length` (Cohere) wins, as in SGLang and vLLM."""
    named = fields.count("model_max_length", default=trained)
    return named if family.context_is_scaled else scaled_context(fields, context=named)


def _ends(folder: ModelDirectory, *configs: Fields, vocab: int) -> tuple[int, ...]:
    """The tokenizer's EOS may be outside the vocabulary."""
    named = [fields.token_ids("eos_token_id", vocab=vocab) for fields in (*configs, folder.generation)]
    return tuple(sorted({*itertools.chain(*named), *(id for id in folder.end_ids if id < vocab)}))


def _kv_heads(fields: Fields, *, heads: int, hidden: int) -> tuple[int, int]:
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.error("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}; set head_dim")
    head_dim = fields.count("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd; RoPE needs pairs")
    return kv_heads, head_dim


def _nextn_layers(fields: Fields, *, default: int) -> int:
    for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        if fields.get(name) is not None:
            return fields.count(name) if fields.get(name) else 0
    return default


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.text(name, default="float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.error(name, f"{dtype} is not supported; supported: {', '.join(DTYPES)}")
    return dtype
