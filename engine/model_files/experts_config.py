"""Mixture-of-experts configuration (MoE)."""

from dataclasses import dataclass, replace
from functools import partial

from engine.model_files.fields import Fields


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """After a layer's prefix.

    `shared_gate`: weighs the shared expert by its sigmoid, empty for 1. `shared_gate_up`: fused,
    empty if separate. `choice_bias`: for the choice, empty if in the router. `stacks`: tensors of
    all experts, preferred (engine/models/expert_mlp.py).
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"
    shared_gate: str = ""
    shared_gate_up: str = ""
    shared_down: str = "down_proj"
    choice_bias: str = ""
    stacks: tuple[str, str] | None = None


PLAIN_NAMES = ExpertNames()
_STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
QWEN_NAMES = ExpertNames(stacks=_STACKS)  # stacks of Qwen3-VL; text models have one tensor per expert
GPT_OSS_NAMES = ExpertNames(router="mlp.router")
QWEN_SHARED_NAMES = ExpertNames(
    shared="mlp.shared_expert",
    shared_gate="mlp.shared_expert_gate",
    stacks=_STACKS,
)
GRANITE_NAMES = ExpertNames(
    router="block_sparse_moe.router.layer",
    stacks=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    shared="shared_mlp",
    shared_gate_up="input_linear",
    shared_down="output_linear",
)
MIXTRAL_NAMES = ExpertNames(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts", gate="w1", up="w3", down="w2"
)
MINIMAX_NAMES = replace(MIXTRAL_NAMES, choice_bias="block_sparse_moe.e_score_correction_bias")


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate), gate and |up| at most `limit` (gpt-oss)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """`count` experts of `intermediate`, `per_token` active, except in `dense_layers`.

    `shared_intermediate`: of the shared expert, 0 without.
    Scores are a softmax, or with `sigmoid` one sigmoid each; then the choice adds a bias and takes
    the `chosen_groups` of `groups` with the largest sum of their `group_best` best scores. Weights
    are the chosen scores, `normalized` to sum 1, times `scaling`.
    `clamped`: replaces silu; then router and experts have biases and one tensor holds all experts.
    """

    count: int
    per_token: int
    intermediate: int
    dense_layers: tuple[int, ...] = ()
    shared_intermediate: int = 0
    sigmoid: bool = False
    normalized: bool = True
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 2
    scaling: float = 1.0
    clamped: ClampedGate | None = None


def read_gpt_oss(fields: Fields, num_layers: int) -> ExpertsConfig:
    clamped = ClampedGate(
        fields.number("swiglu_alpha", default=1.702), fields.number("swiglu_limit", default=7.0, above=0)
    )
    return replace(read_mixtral(fields, num_layers), clamped=clamped)


def read_mixtral(fields: Fields, num_layers: int) -> ExpertsConfig:
    return _checked(
        fields,
        ExpertsConfig(
            count=_count(fields, "num_local_experts", "num_experts"),
            per_token=fields.count("num_experts_per_tok"),
            intermediate=fields.count("intermediate_size"),
        ),
    )


def read_minimax(fields: Fields, num_layers: int) -> ExpertsConfig:
    _check_scores(fields, scores="sigmoid", methods=("noaux_tc",))
    if any(kind != 1 for kind in fields.get("attn_type_list") or []):
        raise fields.error("attn_type_list", "must be 1 for each layer; linear attention is not supported")
    if fields.get("shared_intermediate_size"):
        raise fields.error("shared_intermediate_size", "an expert of all tokens is not supported")
    return replace(read_mixtral(fields, num_layers), sigmoid=True)


def read_granite_experts(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    """A softmax over chosen experts equals the normalized one over all."""
    if fields.get("num_local_experts") == 0:
        return None
    return _checked(
        fields,
        ExpertsConfig(
            count=fields.count("num_local_experts", default=8),
            per_token=fields.count("num_experts_per_tok", default=2),
            intermediate=fields.count("intermediate_size"),
            shared_intermediate=fields.count("shared_intermediate_size", default=1024),
        ),
    )


def read_qwen3(fields: Fields, num_layers: int, *, normalized: bool = False) -> ExpertsConfig:
    step = fields.count("decoder_sparse_step", default=1)
    named = fields.get("mlp_only_layers") or []
    if not isinstance(named, list):
        raise fields.error("mlp_only_layers", f"must be a list of layers, got {named!r}")
    dense = tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)
    return _checked(
        fields,
        ExpertsConfig(
            count=_count(fields, "num_experts", "num_local_experts"),
            per_token=fields.count("num_experts_per_tok"),
            intermediate=fields.count("moe_intermediate_size"),
            dense_layers=dense,
            normalized=fields.flag("norm_topk_prob", default=normalized),
        ),
    )


def read_qwen3_next(fields: Fields, num_layers: int) -> ExpertsConfig:
    shared = fields.count("shared_expert_intermediate_size", default=512)
    return replace(read_qwen3(fields, num_layers, normalized=True), shared_intermediate=shared)


def read_deepseek_v2(fields: Fields, num_layers: int) -> ExpertsConfig:
    _check_scores(fields, scores="softmax", methods=("greedy", "group_limited_greedy"))
    if fields.flag("norm_topk_prob", default=False):
        raise fields.error(
            "norm_topk_prob", "weights of DeepSeek V2's experts that are made 1 together are not supported"
        )
    intermediate = fields.count("moe_intermediate_size")
    grouped = fields.text("topk_method", default="greedy") == "group_limited_greedy"
    return _checked(
        fields,
        ExpertsConfig(
            count=_count(fields, "n_routed_experts", "num_local_experts"),
            per_token=fields.count("num_experts_per_tok"),
            intermediate=intermediate,
            dense_layers=_dense_layers(fields, num_layers, default=0),
            shared_intermediate=intermediate * fields.count("n_shared_experts", default=2),
            normalized=False,
            groups=fields.count("n_group") if grouped else 1,
            chosen_groups=fields.count("topk_group") if grouped else 1,
            group_best=1,
            scaling=fields.number("routed_scaling_factor", default=1.0),
        ),
    )


def _sigmoid_experts(
    fields: Fields,
    num_layers: int,
    *,
    dense: int = 1,
    groups: int = 1,
    chosen_groups: int = 1,
    scaling: float,
    names_scores: bool = True,
) -> ExpertsConfig:
    """The defaults of an architecture; `names_scores`: its config.json may name them."""
    if names_scores:
        _check_scores(fields, scores="sigmoid", methods=("noaux_tc",))
    intermediate = fields.count("moe_intermediate_size")
    return _checked(
        fields,
        ExpertsConfig(
            count=_count(fields, "n_routed_experts", "num_local_experts"),
            per_token=fields.count("num_experts_per_tok"),
            intermediate=intermediate,
            dense_layers=_dense_layers(fields, num_layers, default=dense),
            shared_intermediate=intermediate * fields.count("n_shared_experts", default=1),
            sigmoid=True,
            normalized=fields.flag("norm_topk_prob", default=True),
            groups=fields.count("n_group", default=groups),
            chosen_groups=fields.count("topk_group", default=chosen_groups),
            scaling=fields.number("routed_scaling_factor", default=scaling),
        ),
    )


read_glm4 = partial(_sigmoid_experts, scaling=1.0, names_scores=False)
read_glm4_lite = partial(_sigmoid_experts, scaling=1.8)
read_glm_sparse = partial(_sigmoid_experts, dense=3, scaling=2.5)
read_deepseek_v3 = partial(_sigmoid_experts, dense=3, groups=8, chosen_groups=4, scaling=2.5)


def _check_scores(fields: Fields, *, scores: str, methods: tuple[str, ...]) -> None:
    for name, known in (("scoring_func", (scores,)), ("topk_method", methods)):
        if (value := fields.text(name, default=known[0])) not in known:
            raise fields.error(name, f"{value} is not supported; this architecture has {' or '.join(known)}")
    if (every := fields.count("moe_layer_freq", default=1)) != 1:
        raise fields.error("moe_layer_freq", f"{every} is not supported; only 1 is, experts in each layer")


def _dense_layers(fields: Fields, num_layers: int, *, default: int) -> tuple[int, ...]:
    if (kinds := fields.get("mlp_layer_types")) is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
            raise fields.error("mlp_layer_types", f"must name {num_layers} layers, each dense or sparse")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    dense = fields.get("first_k_dense_replace", default)
    if not isinstance(dense, int) or dense < 0:
        raise fields.error("first_k_dense_replace", f"must be a number of layers, got {dense!r}")
    return tuple(range(min(dense, num_layers)))


def _count(fields: Fields, name: str, other: str) -> int:
    return fields.count(other if fields.get(name) is None and fields.get(other) is not None else name)


def _checked(fields: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    if experts.per_token > experts.count:
        raise fields.error("num_experts_per_tok", f"{experts.per_token} of {experts.count} experts")
    if experts.count % experts.groups or experts.count // experts.groups < 2 <= experts.groups:
        raise fields.error(
            "n_group", f"{experts.groups} groups of {experts.count} experts; each needs as many, two at least"
        )
    if experts.chosen_groups > experts.groups:
        raise fields.error("topk_group", f"{experts.chosen_groups} of {experts.groups} groups")
    if experts.per_token > experts.count // experts.groups * experts.chosen_groups:
        raise fields.error("num_experts_per_tok", f"{experts.per_token}, more than {experts.chosen_groups} groups have")
    return experts
