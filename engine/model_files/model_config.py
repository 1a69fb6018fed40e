"""The model configuration of a checkpoint, checked and frozen. Never torch: the frontend imports it.

Field names are those of transformers 4 and 5 (config.json, generation_config.json); engine/gguf translates GGUF files.
"""

import hashlib
import itertools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.model_files.arithmetic import PLAIN, Arithmetic
from engine.model_files.experts_config import ExpertsConfig
from engine.model_files.families import Family
from engine.model_files.fields import Fields
from engine.model_files.folder import GGUFFolder, ModelFolder, open_folder
from engine.model_files.head_config import TOKEN_HEAD, TOKENS, HeadConfig, read_family, read_head
from engine.model_files.latent_config import LatentConfig, read_latent, rope_dim
from engine.model_files.layer_kinds import read_kinds, read_ropes, read_windows
from engine.model_files.other_kinds import check_gguf, check_pipeline
from engine.model_files.recurrent_config import RecurrentConfig
from engine.model_files.rope_config import RopeConfig, scaled_context
from engine.model_files.stored_weights import StoredWeights, read_stored_weights
from engine.model_files.text_part import text_part
from engine.model_files.vision_config import VisionConfig, read_vision

if TYPE_CHECKING:
    from engine.model_files.drafter_config import DrafterConfig

DEFAULT_MODEL_PATH = str(Path(__file__).parents[1] / "models" / "recall" / "checkpoint")
WIDE_MODEL_PATH = str(Path(__file__).parents[1] / "models" / "recall" / "wide")

MOST_LAYERS = 10_000  # what is known of each layer is kept in lists
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model. Sizes in elements; `max_position_embeddings` in tokens, to which RoPE's scaling lengthens its context.

    `attention_bias`: q, k and v have a bias; `attention_out_bias`: o has one too. `dtype`: of the stored weights.
    `eos_token_ids`: of all files, ascending. `qk_norm`, `norms`, `fused_qkv`, `fused_mlp`: as in `Family`.
    `quantization`: how weights are quantized; "": they are floats. `stored`: how they are in the files.
    `experts`: of a mixture (None: all MLPs are dense, of `intermediate_size`).
    `latent`: of latent attention; `num_kv_heads` is 1 then, and `head_dim` what the cache keeps of a token.
    `recurrent`: which layers have a state in place of K and V; None: none has. `attention_gate`: as in `Family`.
    `layer_ropes`: of each layer, None where it turns nothing; (): all are `rope`.
    `windows`: the last tokens that a query of each layer sees, 0 for all; (): no layer has a window below the context.
    `nextn_layers`: layers of the checkpoint beside those of the model, which predict the token after the next.
    `drafter`: what drafts for it (`--speculative-algorithm`); None: no model does.
    `vision`: what sees images for it; None: it takes text alone.
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
    rope: RopeConfig
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    tie_word_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    qk_norm: str
    norms: str
    fused_qkv: bool
    fused_mlp: bool
    head: HeadConfig = TOKEN_HEAD
    arithmetic: Arithmetic = PLAIN
    experts: ExpertsConfig | None
    latent: LatentConfig | None
    max_position_embeddings: int
    windows: tuple[int, ...]
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    recurrent: RecurrentConfig | None = None
    attention_gate: bool = False
    quantization: str = ""
    stored: StoredWeights | None = None
    nextn_layers: int = 0
    drafter: "DrafterConfig | None" = None
    vision: VisionConfig | None = None

    @property
    def generates(self) -> bool:
        """Whether it has logits of tokens."""
        return self.head.kind == TOKENS

    def rope_of(self, layer: int) -> RopeConfig | None:
        """None: the layer does not turn q and k."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def attention_needs(self) -> tuple[str, ...]:
        """Return the features of its attention beyond plain attention and windows."""
        has = {"softcaps of scores": self.arithmetic.score_cap, "attention sinks": self.arithmetic.sinks}
        return tuple(name for name, there in has.items() if there)

    def is_dense(self, layer: int) -> bool:
        """Whether its MLP is one, not a mixture of experts."""
        return self.experts is None or layer in self.experts.dense_layers

    def has_kv(self, layer: int) -> bool:
        """Whether it has attention, not a recurrent state alone."""
        recurrent = self.recurrent
        return recurrent is None or recurrent.beside_attention or layer not in recurrent.layers

    def kv_layers(self, layers: range) -> range:
        """Return the layers of `layers` that have KV, numbered among such layers."""
        first = sum(map(self.has_kv, range(layers.start)))
        return range(first, first + sum(map(self.has_kv, layers)))

    def state_layers(self, layers: range) -> range:
        """Return the recurrent layers of `layers`, numbered among such layers."""
        places = () if self.recurrent is None else self.recurrent.layers
        first = sum(layer < layers.start for layer in places)
        return range(first, first + sum(layer in layers for layer in places))

    def recurrent_sizes(self) -> dict[str, int]:
        """Return the input sizes of the recurrent layers' last product, by name."""
        return {} if self.recurrent is None else self.recurrent.sizes()

    def mlp_sizes(self) -> dict[str, int]:
        """Intermediate sizes of all kinds of MLP in it, by what they are called."""
        experts = self.experts
        if experts is None:
            return {"intermediate_size": self.intermediate_size}
        sizes = {"experts' intermediate_size": experts.intermediate}
        if experts.shared_intermediate:
            sizes["shared expert's intermediate_size"] = experts.shared_intermediate
        return sizes | ({"intermediate_size": self.intermediate_size} if experts.dense_layers else {})

    @property
    def mlp_matrices(self) -> int:
        """Return the number of an MLP's matrices, each [intermediate, hidden]."""
        return 3 if self.arithmetic.is_gated else 2

    def mlp_width(self, *, active: bool) -> float:
        """The mean over layers of what a layer's MLPs have together as intermediate; `active`: only those that a token takes."""
        experts = self.experts
        if experts is None:
            return self.intermediate_size
        sparse = (experts.per_token if active else experts.count) * experts.intermediate + experts.shared_intermediate
        num_dense = len(experts.dense_layers)
        return (num_dense * self.intermediate_size + (self.num_layers - num_dense) * sparse) / self.num_layers

    def attention_weights(self) -> int:
        """Count the elements of the matrices of a layer's attention."""
        if self.latent is not None:
            return self.latent.weights(hidden=self.hidden_size, heads=self.num_heads)
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    def pair_flops(self) -> int:
        """Count the operations of a layer's attention for one query token and one key token."""
        if self.latent is not None:
            return 2 * self.num_heads * (self.latent.read_dim + self.latent.rank)
        return 4 * self.num_heads * self.head_dim

    def attended_dim(self) -> int:
        """Return the size of a head at the output product."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    def quantized(self, scheme: str | None) -> "ModelConfig":
        """This model, its weights rounded by `scheme` (`--quantization`) when they are loaded."""
        return replace(self, quantization="+".join(filter(None, (self.quantization, scheme))))

    def signature(self) -> str:
        """Return the signature on which prefill and decode must agree: "Qwen3ForCausalLM/L2/kv1x128/V528/1f2e3d4c5b6a".

        The tail hashes every field that changes the numbers, but a quantization and a drafter, which stand behind it.
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


def load_model_config(model: str | Path | ModelFolder, *, architecture: str = "") -> ModelConfig:
    """Read and check the configuration of `model`, a directory or a GGUF file. `architecture`: in place of the named one.

    Raises ConfigError.
    """
    folder = open_folder(model)
    if isinstance(folder, GGUFFolder):
        check_gguf(folder.path, folder.file.value("general.architecture", str, ""))
    else:
        check_pipeline(folder.path)
    fields = folder.config
    return _model_config(folder, fields.with_values(architectures=[architecture]) if architecture else fields)


def _model_config(folder: ModelFolder, fields: Fields) -> ModelConfig:
    whole, fields = fields, text_part(fields)
    name, family, kind = read_family(fields)
    fields = fields.with_defaults(family.defaults)
    _refuse_unsupported(fields)
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
    bias = family.qkv_bias
    if bias is None:
        bias = fields.flag("attention_bias", default=family.default_bias)
    kinds = read_kinds(fields, family=family, num_layers=num_layers)
    rope, layer_ropes = read_ropes(fields, kinds, family=family, context=trained, head_dim=head_dim)
    latent = read_latent(fields, rope, family) if family.latent else None
    experts = None if family.experts is None else family.experts(fields, num_layers)
    return ModelConfig(
        architecture=name,
        model_type=fields.text("model_type", default=""),
        hidden_size=hidden,
        intermediate_size=fields.count(family.mlp.width, default=_unused_size(experts)),
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
        bos_token_id=next(iter(_token_ids(fields, "bos_token_id", vocab=vocab)), None),
        eos_token_ids=_ends(folder, whole, fields, vocab=vocab),
    )


def _ends(folder: ModelFolder, *configs: Fields, vocab: int) -> tuple[int, ...]:
    """Join the ends of all files. The tokenizer may name one that the model has no row for."""
    named = [_token_ids(fields, "eos_token_id", vocab=vocab) for fields in (*configs, folder.generation)]
    return tuple(sorted({*itertools.chain(*named), *(id for id in folder.end_ids if id < vocab)}))


def _context(fields: Fields, trained: int, family: Family) -> int:
    """Return the longest request. `model_max_length` (Cohere) has precedence, as in SGLang and vLLM."""
    named = fields.count("model_max_length", default=trained)
    return named if family.context_is_scaled else scaled_context(fields, context=named)


def _unused_size(experts: ExpertsConfig | None) -> int | None:
    """Return the stand-in for the MLPs' intermediate size where no layer has an MLP."""
    return None if experts is None or experts.dense_layers else experts.intermediate


def _kv_heads(fields: Fields, *, heads: int, hidden: int) -> tuple[int, int]:
    """Their number and size."""
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.error("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}; set head_dim")
    head_dim = fields.count("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd; RoPE needs pairs")
    return kv_heads, head_dim


def _refuse_unsupported(fields: Fields) -> None:
    if fields.flag("mlp_bias", default=False):
        raise fields.error("mlp_bias", "a bias in the MLP is not supported")


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


def _token_ids(fields: Fields, name: str, *, vocab: int) -> list[int]:
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise fields.error(name, f"{token!r} is not a token id (0 to {vocab - 1})")
    return ids
