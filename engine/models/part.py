"""A rank's part of a model: cuts of the checkpoint, linear layers over ranks."""

from collections.abc import Sequence
from copy import copy
from itertools import accumulate

import torch

from engine.kv.cache_spec import CacheSpec
from engine.layers.linear import LayerNorm, Linear, Norm, RMSNorm, RowLinear, SiteShape
from engine.layers.rope import head_order
from engine.model_files.head_config import family_of
from engine.model_files.model_config import ModelConfig
from engine.model_files.tensor_names import CLIP, PROJECTOR, VISUAL
from engine.models.cache_specs import layer_spec
from engine.models.checkpoint import Checkpoint
from engine.models.expert_balance import ExpertBalance
from engine.models.matrices import STORED, Matrices
from engine.parallel.collectives import SINGLE_RANK, Collectives
from engine.parallel.expert_placement import IN_ORDER, ExpertPlan
from engine.parallel.layout import ALONE, Cut, Extent, Place, cut_of, mlp_share, share_of
from engine.parallel.row_exchange import RowExchange
from engine.quant.integers import Weight, rows_of

EMBEDDING = "model.embed_tokens.weight"


class ModelPart:
    """`collectives`: of the stage; `exchange`: of all ranks, with DP attention.

    `reduce_units`: as `--reduce-units`, 0 is off.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        place: Place = ALONE,
        collectives: Collectives = SINGLE_RANK,
        exchange: RowExchange | None = None,
        reduce_units: int = 0,
        matrices: Matrices = STORED,
        experts: ExpertPlan = IN_ORDER,
    ) -> None:
        assert (collectives.rank, collectives.size) == (place.tp_rank, place.tp_size), place
        assert (exchange is None) == (place.dp_size == 1), place
        self.config = config
        self.checkpoint = checkpoint
        self.place = place
        self.share = share_of(config, place)
        self.collectives = collectives
        self.exchange = exchange
        self.matrices = matrices
        self.experts = experts
        self.balance = self._make_balance() if experts.rebalance_every and place.ep_size > 1 else None
        self._segments = max(1, reduce_units // place.tp_size)
        self.mlp_segments = max(1, reduce_units // place.mlp_size)
        self.whole_segments = max(1, reduce_units)  # for what is replicated
        family = family_of(config.architecture)
        self.mlp_names, self.out_name, self.final_norm = family.mlp, family.out, f"model.{family.final_norm}"
        self._head_bias = family.head_bias
        self.q = Cut(config.num_heads, self.share.heads).times(config.head_dim)
        self.kv = Cut(config.num_kv_heads, self.share.kv_heads).times(config.head_dim)

    def over(self, checkpoint: Checkpoint) -> "ModelPart":
        other = copy(self)
        other.checkpoint = checkpoint
        return other

    def of_dp_rank(self) -> "ModelPart":
        other = copy(self)
        other.place, other.exchange = self.place.in_dp_rank(), None
        other.mlp_segments = max(1, self.whole_segments // other.place.mlp_size)
        return other

    def _make_balance(self) -> ExpertBalance:
        ranks = self.collectives if self.exchange is None else self.exchange.ranks
        return ExpertBalance(
            ranks, every=self.experts.rebalance_every, groups=self.experts.groups, nodes=self.experts.nodes
        )

    def no_rows(self) -> torch.Tensor:
        """[0, hidden]: input of a step without own tokens."""
        checkpoint = self.checkpoint
        return torch.empty((0, self.config.hidden_size), dtype=checkpoint.dtype, device=checkpoint.device)

    def mlp_cut(self, width: int) -> Cut:
        return Cut(width, mlp_share(width, self.place))

    def table(self, name: str) -> torch.Tensor:
        return self.checkpoint.take(name, [Cut(self.config.vocab_size, self.share.vocab), self.config.hidden_size])

    def cache_spec(self, *, window: int = 0) -> CacheSpec:
        return layer_spec(self.config, self.share, dtype=self.checkpoint.dtype_name, window=window)

    def head(self, tied: Sequence[torch.Tensor] = ()) -> Linear:
        """`tied`: the embedding table, if that is the head."""
        name, rows = EMBEDDING if tied else "lm_head.weight", Cut(self.config.vocab_size, self.share.vocab)
        bias = self.checkpoint.take("lm_head.bias", [rows]) if self._head_bias else None
        inputs = self.config.hidden_size

        def floats() -> Weight:
            return self.matrices.rounded_head(*(tied or [self.table(name)]))

        return Linear(self.matrices.taken(self.checkpoint, [name], [rows], inputs, (), floats=floats), bias)

    def labels(self) -> torch.Tensor:
        """[labels, hidden] of a classifier, fp32."""
        count = len(self.config.head.labels) if self.place.is_last_stage else 0
        if not count:
            return torch.empty((0, self.config.hidden_size), device=self.checkpoint.device)
        return self.checkpoint.take("score.weight", [count, self.config.hidden_size], dtype=torch.float32)

    def matrix(
        self,
        names: Sequence[str],
        rows: Sequence[Extent],
        inputs: Extent,
        *,
        segments: int = 1,
        factors: Sequence[float] = (),
    ) -> Weight:
        """Load the matrices `names`, [rows[i], inputs], concatenated.

        `segments`: of inputs, summed apart. `factors`: one per matrix.
        """

        def floats() -> Weight:
            read = self.matrices.read_inputs(names[0], inputs, segments)
            return self.matrices.rounded(self._floats(names, rows, read, factors), inputs)

        return self.matrices.taken(self.checkpoint, names, rows, inputs, factors, floats=floats)

    def _floats(
        self, names: Sequence[str], rows: Sequence[Extent], inputs: Extent, factors: Sequence[float]
    ) -> torch.Tensor:
        if not factors or set(factors) == {1.0}:
            return self.checkpoint.take_rows(names, rows, [inputs])
        weight = self.checkpoint.take_rows(names, rows, [inputs], dtype=torch.float32)
        for part, factor in zip(torch.split(weight, [len(cut_of(cut)) for cut in rows]), factors, strict=True):
            part.mul_(factor)
        return weight.to(self.checkpoint.dtype)

    def vector(self, name: str) -> torch.Tensor:
        return self.checkpoint.take(name, [self.config.hidden_size])

    def norm(self, name: str) -> Norm:
        arithmetic, eps = self.config.arithmetic, self.config.rms_norm_eps
        if arithmetic.norm == "bare":
            return LayerNorm(None, None, eps=eps)
        weight = self.vector(f"{name}.weight")
        if arithmetic.norm == "layer":
            return LayerNorm(weight, self.vector(f"{name}.bias"), eps=eps)
        return RMSNorm(weight, eps=eps, offset=arithmetic.norm_offset)

    def qkv(self, prefix: str, *, inputs: int | None = None) -> tuple[Linear, SiteShape]:
        """In RoPE order, after gates, if any."""
        config, rows = self.config, [self.q, self.kv, self.kv]
        names = [f"{prefix}{name}_proj" for name in "qkv"]
        if config.fused_qkv:
            names, rows = [f"{prefix}qkv_proj"] * 3, in_one(rows)
        order, turn = None, head_order(config.rope, config.head_dim)
        heads, kv_heads = len(self.share.heads), len(self.share.kv_heads)
        if config.attention_gate:
            rows[0] = Cut(config.num_heads, self.share.heads).times(2 * config.head_dim)
            order = _gated_order(turn or range(config.head_dim), heads, kv_heads)
        elif turn is not None:
            order = _row_order(turn, heads, kv_heads)
        return self.columns(names, rows, bias=config.attention_bias, order=order, inputs=inputs)

    def gate_up(self, prefix: str, *, gates: bool = False) -> tuple[Linear, SiteShape]:
        cut, own = self.mlp_cut(self.config.intermediate_size), self.mlp_names
        if not self.config.arithmetic.is_gated:
            return self.columns([f"{prefix}{own.gate_up}"], [cut], bias=own.bias)
        names, rows = [f"{prefix}{name}_proj" for name in ("gate", "up")], [cut, cut]
        if self.config.fused_mlp:
            names, rows = [f"{prefix}{own.gate_up}"] * 2, in_one(rows)
        return self.columns(names, rows, gates=gates, factors=[self.config.arithmetic.gate_factor, 1.0])

    def columns(
        self,
        names: Sequence[str],
        rows: Sequence[Cut],
        *,
        bias: bool = False,
        gates: bool = False,
        order: tuple[int, ...] | None = None,
        inputs: int | None = None,
        factors: Sequence[float] = (),
    ) -> tuple[Linear, SiteShape]:
        """Load column-parallel matrices [rows[i], inputs], concatenated.

        `order`: as in `SiteShape`. `inputs`: default the hidden size.
        """
        inputs = inputs or self.config.hidden_size
        weight = self.matrix([f"{name}.weight" for name in names], rows, inputs, factors=factors)
        vector = self.checkpoint.take_rows([f"{name}.bias" for name in names], rows, []) if bias else None
        if order is not None:
            weight, vector = rows_of(weight, order), None if vector is None else vector[list(order)]
        return Linear(weight, vector, gates=gates), SiteShape(inputs, tuple(zip(names, rows, strict=True)), order)

    def rows(
        self, name: str, inputs: Cut, *, bias: bool = False, factor: float = 1.0
    ) -> tuple[Linear | RowLinear, SiteShape]:
        """Load a row-parallel matrix [hidden, inputs], times `factor`."""
        hidden = self.config.hidden_size
        weight = self.matrix([f"{name}.weight"], [hidden], inputs, segments=self._segments, factors=[factor])
        vector = self.vector(f"{name}.bias") if bias else None
        shape = SiteShape(inputs, ((name, hidden),))
        if self.collectives.size == 1:
            return Linear(weight, vector, segments=self._segments), shape
        own_bias = vector if self.place.tp_rank == 0 else None
        return RowLinear(weight, own_bias, collectives=self.collectives, segments=self._segments), shape

    def leave_the_rest(self) -> None:
        config, place = self.config, self.place
        for index in range(config.num_layers):
            if index not in self.share.layers:
                self.checkpoint.ignore(f"model.layers.{index}.")
        if config.experts is not None:
            self.checkpoint.ignore(f"model.layers.{config.num_layers}.")  # predicts tokens after the next (MTP)
        for index in range(config.num_layers, config.num_layers + config.nextn_layers):
            self.checkpoint.ignore(f"model.layers.{index}.")
        if config.recurrent is not None:
            self.checkpoint.ignore("mtp.")  # the same in hybrids
        if not place.is_first_stage:
            self.checkpoint.ignore(EMBEDDING)
        if config.vision is None or not place.is_first_stage:
            for tower in (VISUAL, CLIP, PROJECTOR):
                self.checkpoint.ignore(tower)
        if not place.is_last_stage:
            self.checkpoint.ignore(f"{self.final_norm}.")
            self.checkpoint.ignore("score.weight")
        if config.tie_word_embeddings or not config.generates or not place.is_last_stage:
            self.checkpoint.ignore("lm_head.weight")
        if not config.generates or not place.is_last_stage:
            self.checkpoint.ignore("lm_head.bias")


def in_one(rows: Sequence[Cut]) -> list[Cut]:
    total = sum(cut.total for cut in rows)
    starts = accumulate((cut.total for cut in rows), initial=0)
    return [cut.within(total, at=at) for cut, at in zip(rows, starts, strict=False)]


def _row_order(order: Sequence[int], heads: int, kv_heads: int) -> tuple[int, ...]:
    size = len(order)
    turned = [head * size + dim for head in range(heads + kv_heads) for dim in order]
    return (*turned, *range(len(turned), len(turned) + kv_heads * size))


def _gated_order(order: Sequence[int], heads: int, kv_heads: int) -> tuple[int, ...]:
    size = len(order)
    gates = [head * 2 * size + size + dim for head in range(heads) for dim in range(size)]
    q = [head * 2 * size + dim for head in range(heads) for dim in order]
    kv = [2 * heads * size + row for row in _row_order(order, 0, kv_heads)]
    return (*gates, *q, *kv)
