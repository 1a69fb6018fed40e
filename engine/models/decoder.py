"""The dense decoder of Llama, Mistral, Qwen2 and Qwen3; they differ in biases and in the norm on q and k."""

from collections.abc import Callable

import torch

from engine.kv.kv_pool import CacheSpec
from engine.layers.linear import Linear, LinearSite, SiteShape
from engine.layers.norm import RMSNorm
from engine.layers.rope import NormedRope, Rope, Turn, Unturned
from engine.model_files.model_config import ModelConfig
from engine.models.checkpoint import Checkpoint

# (layer, new tokens) -> [T, Hq * D]: norms and turns q and k, writes k and v into the KV pool, then attends with scale
# D ** -0.5.
Attend = Callable[[int, Unturned], torch.Tensor]

Begun = tuple[torch.Tensor, ...]  # what the layers start from: a row for each token


class DenseDecoder:
    """Pre-norm attention and gated MLP, `num_layers` times.

    T tokens of any requests are one flat batch: only `attend` separates requests.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        self._spec = CacheSpec(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=checkpoint.dtype_name)
        self._config = config
        table = [config.vocab_size, config.hidden_size]
        self._embedding = checkpoint.take("model.embed_tokens.weight", table)
        self._layers = [_Layer(config, checkpoint, index=index) for index in range(config.num_layers)]
        self._norm = RMSNorm(checkpoint.take("model.norm.weight", [config.hidden_size]), eps=config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self._head = Linear(self._embedding if tied else checkpoint.take("lm_head.weight", table))
        if tied:
            checkpoint.ignore("lm_head.weight")  # some exporters write the tied copy too
        self._rope = Rope(config, dtype=checkpoint.dtype, device=checkpoint.device)

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def cache_specs(self) -> list[CacheSpec]:
        return [self._spec] * len(self._layers)

    def linear_sites(self) -> list[LinearSite]:
        """The matrices that adapters may change, in the same order for all models of one shape."""
        return [site for index, layer in enumerate(self._layers) for site in layer.sites(self._config, index)]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """[T, hidden] after the final norm; ids, positions [T] i64."""
        return self.layers(self.begin(input_ids, positions), attend)

    def begin(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Begun:
        """The embeddings [T, hidden], and cos and sin of their positions."""
        return self._embedding.index_select(0, input_ids), *self._rope.at(positions)

    def layers(self, begun: Begun, attend: Attend) -> torch.Tensor:
        """The rest of `forward`; may change `begun` in place."""
        x, cosine, sine = begun
        delta = None
        for layer in self._layers:
            delta = layer(x, delta, (cosine, sine), attend)
        return self._norm.of_sum(x, delta)

    def logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """[n, vocab] float32 for `hidden` [n, hidden], rows from `forward`; in `out` if given."""
        return self._head.in_float32(hidden, out=out)


class _Layer:
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, *, index: int) -> None:
        prefix = f"model.layers.{index}."
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._attention_norm = RMSNorm(checkpoint.take(f"{prefix}input_layernorm.weight", [hidden]), eps=eps)
        self._attention = _Attention(config, checkpoint, index=index)
        self._mlp_norm = RMSNorm(checkpoint.take(f"{prefix}post_attention_layernorm.weight", [hidden]), eps=eps)
        self._mlp = _MLP(config, checkpoint, prefix=f"{prefix}mlp.")

    def sites(self, config: ModelConfig, index: int) -> list[LinearSite]:
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        hidden, size = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = ((f"{attention}q_proj", q), (f"{attention}k_proj", kv), (f"{attention}v_proj", kv))
        gate_up = ((f"{mlp}gate_proj", size), (f"{mlp}up_proj", size))
        return [
            LinearSite(self._attention.qkv, SiteShape(hidden, qkv)),
            LinearSite(self._attention.out, SiteShape(q, ((f"{attention}o_proj", hidden),))),
            LinearSite(self._mlp.gate_up, SiteShape(hidden, gate_up)),
            LinearSite(self._mlp.down, SiteShape(size, ((f"{mlp}down_proj", hidden),))),
        ]

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None, turn: Turn, attend: Attend) -> torch.Tensor:
        """Add `delta`, the output of the layer before, to x; return this layer's. So each sum is one pass with a norm."""
        delta = self._attention.of_norm(self._attention_norm, x, delta, turn, attend)
        return self._mlp.of_norm(self._mlp_norm, x, delta)


class _Attention:
    """q, k and v come from one matrix and stay one tensor until they are turned, since every operation counts."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, *, index: int) -> None:
        prefix = f"model.layers.{index}.self_attn."
        heads, kv_heads, dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        rows = [heads * dim, kv_heads * dim, kv_heads * dim]
        names = [f"{prefix}{name}_proj" for name in "qkv"]
        weight = checkpoint.take_rows([f"{name}.weight" for name in names], rows, [hidden])
        bias = checkpoint.take_rows([f"{name}.bias" for name in names], rows, []) if config.attention_bias else None
        self._index = index
        self._heads, self._kv_heads, self._dim = heads, kv_heads, dim
        self.qkv = Linear(weight, bias)
        out_bias = checkpoint.take(f"{prefix}o_proj.bias", [hidden]) if config.attention_out_bias else None
        self.out = Linear(checkpoint.take(f"{prefix}o_proj.weight", [hidden, heads * dim]), out_bias)
        norm = _qk_norm(config, checkpoint, prefix=prefix) if config.qk_norm else None
        like = torch.empty(dim, dtype=weight.dtype, device=weight.device)
        self._rope = NormedRope(norm, like=like, eps=config.rms_norm_eps)

    def of_norm(
        self, norm: RMSNorm, x: torch.Tensor, delta: torch.Tensor | None, turn: Turn, attend: Attend
    ) -> torch.Tensor:
        """Attention of norm(x + delta), which x becomes before the norm."""
        heads, kv_heads = self._heads, self._kv_heads
        qkv = self.qkv.of_norm(norm, x, delta).view(-1, heads + 2 * kv_heads, self._dim)
        return self.out(attend(self._index, Unturned(qkv, kv_heads, self._rope, turn)))


def _qk_norm(config: ModelConfig, checkpoint: Checkpoint, *, prefix: str) -> torch.Tensor:
    """[heads + kv_heads, head_dim]: the norm's weight of each head."""
    q = checkpoint.take(f"{prefix}q_norm.weight", [config.head_dim])
    k = checkpoint.take(f"{prefix}k_norm.weight", [config.head_dim])
    return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))


class _MLP:
    """down(silu(gate(x)) * up(x)), gate and up in one matrix [2 * intermediate, hidden]."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, *, prefix: str) -> None:
        hidden, size = config.hidden_size, config.intermediate_size
        names = [f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"]
        self.gate_up = Linear(checkpoint.take_rows(names, [size, size], [hidden]), gates=True)
        self.down = Linear(checkpoint.take(f"{prefix}down_proj.weight", [hidden, size]))

    def of_norm(self, norm: RMSNorm, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """The MLP of norm(x + delta), which x becomes before the norm."""
        return self.down(self.gate_up.gated_of_norm(norm, x, delta))
