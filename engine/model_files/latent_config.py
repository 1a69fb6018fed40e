"""Latent attention configuration (MLA, arXiv:2405.04434)."""

from dataclasses import dataclass

from engine.model_files.families import Family
from engine.model_files.fields import Fields
from engine.model_files.rope_config import RopeConfig, softmax_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """DeepSeek V3.2's index: a query attends to the `chosen` best tokens.

    It has `heads` queries of `dim`, and keys of `dim`. `interleaved`: RoPE pairs are neighbours.
    """

    heads: int
    dim: int
    chosen: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """MLA: a token's cached vector has `rank` latent dims and `rope_dim` with RoPE.

    `q_rank`: size of q's vector, 0 for one q matrix. A head has q and k of `plain_dim` without
    RoPE, then `rope_dim`, and v of `value_dim`. `scale`: of scores.
    """

    rank: int
    q_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    index: IndexConfig | None = None

    @property
    def read_dim(self) -> int:
        return self.rank + self.rope_dim

    @property
    def width(self) -> int:
        """Cached elements per token: latent, rotary key, index key."""
        return self.read_dim + (self.index.dim if self.index else 0)

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rope_dim

    def weights(self, *, hidden: int, heads: int) -> int:
        queries, ups = heads * self.query_dim, heads * (self.plain_dim + self.value_dim)
        q = self.q_rank * (hidden + queries) if self.q_rank else hidden * queries
        index = 0 if self.index is None else self.index.heads * (hidden + self.q_rank * self.index.dim)
        return q + index + hidden * self.width + self.rank * ups + heads * self.value_dim * hidden


def rope_dim(fields: Fields) -> int:
    """Read the rotary size. Raises ConfigError if odd."""
    dim = fields.count("qk_rope_head_dim")
    if dim % 2:
        raise fields.error("qk_rope_head_dim", f"{dim} is odd; RoPE needs pairs")
    return dim


def read_latent(fields: Fields, rope: RopeConfig, family: Family) -> LatentConfig:
    """Raises ConfigError."""
    if fields.flag("attention_bias", default=False):
        raise fields.error("attention_bias", "latent attention with biases is not supported")
    plain = fields.count("qk_nope_head_dim")
    return LatentConfig(
        rank=fields.count("kv_lora_rank"),
        q_rank=0 if fields.get("q_lora_rank") is None else fields.count("q_lora_rank"),
        plain_dim=plain,
        rope_dim=rope.dim,
        value_dim=fields.count("v_head_dim"),
        scale=(plain + rope.dim) ** -0.5 * softmax_factor(fields, rope),
        index=_index(fields, rope, pairs=family.index_pairs) if family.indexed else None,
    )


def _index(fields: Fields, rope: RopeConfig, *, pairs: bool) -> IndexConfig:
    _refuse_sharing(fields)
    dim = fields.count("index_head_dim")
    if dim < rope.dim:
        raise fields.error("index_head_dim", f"{dim} is less than qk_rope_head_dim {rope.dim}, which RoPE turns of it")
    fields.count("q_lora_rank")  # source of the index's queries
    return IndexConfig(
        heads=fields.count("index_n_heads"),
        dim=dim,
        chosen=fields.count("index_topk"),
        interleaved=fields.flag("indexer_rope_interleave", default=pairs),
    )


def _refuse_sharing(fields: Fields) -> None:
    shared = {
        "indexer_types": "shared" in (fields.get("indexer_types") or ()),
        "index_topk_pattern": "S" in (fields.get("index_topk_pattern") or ""),
        "index_topk_freq": fields.count("index_topk_freq", default=1) > 1 and fields.get("indexer_types") is None,
    }
    for name, there in shared.items():
        if there:
            raise fields.error(name, "layers that take over the choice of another are not supported")
