"""Cost of a drafting model. Pure."""

from dataclasses import dataclass, replace

from engine.core.plan import Plan
from engine.model_files.drafter_config import STANDALONE, DrafterConfig
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import share_of
from planner.shape import Shape, fullest, shape_of
from planner.step_time import Fitted, Roofline, StepLoad, StepTime, load_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTime:
    """Times of a drafter: of its layers in a step of the model, of a pass (a token per request),
    and the overhead of a draft step.
    """

    beside: StepTime
    a_pass: StepTime
    step_s: float


def plan_seconds(plan: Plan, model: StepTime, drafter: DrafterTime | None) -> float:
    """Return a step's time; a drafter also processes the model's tokens."""
    if plan.only_drafts:
        assert drafter is not None, "a plan asks a drafter, and there is none"
        return drafter.step_s + sum(drafter.a_pass.seconds(load) for load in pass_loads(plan))
    load = load_of(plan)
    return model.seconds(load) + (0.0 if drafter is None else drafter.beside.seconds(load))


def pass_loads(plan: Plan) -> list[StepLoad]:
    """Return a draft step's passes: one row per unfinished request."""
    loads = []
    for number in range(max(item.to_draft for item in plan.items)):
        left = [item for item in plan.items if item.to_draft > number]
        context = sum(item.start + 1 + number for item in left)
        loads.append(StepLoad(decodes=len(left), decode_context=context, samples=len(left)))
    return loads


def by_roofline(model: Roofline, shape: Shape) -> DrafterTime:
    """Return the time; a pass has its layers' share of the overhead."""
    layers_s = model.efficiency.step_s * shape.layers / model.shape.layers
    return DrafterTime(
        beside=replace(model, shape=_without_head(shape), efficiency=replace(model.efficiency, step_s=0.0)),
        a_pass=replace(model, shape=shape, efficiency=replace(model.efficiency, step_s=layers_s)),
        step_s=model.efficiency.step_s,
    )


def by_weights(model: Fitted, of: Shape, shape: Shape) -> DrafterTime:
    """Scale times measured for shape `of`."""
    return DrafterTime(beside=_scaled(model, of, _without_head(shape)), a_pass=_scaled(model, of, shape), step_s=0.0)


def drafter_shape(model: ModelConfig, tp: int = 1, *, on_cpu: bool = False) -> Shape:
    """Return the shape on the fullest GPU, with its own or the model's head."""
    drafter, lent = model.drafter, shape_of(model, tp, on_cpu=on_cpu).head_params
    assert drafter is not None
    if drafter.kind == STANDALONE:
        return shape_of(drafter.layers, tp, on_cpu=on_cpu)
    layer = shape_of(replace(drafter.layers, num_layers=1, nextn_layers=0), tp, on_cpu=on_cpu)
    size, own_head = layer.element_bytes, -(-drafter.head_rows // tp) * layer.hidden
    joins = _join_params(drafter) + _wider_attention(drafter, tp)
    layer_bytes = layer.read_bytes - (layer.head_params - joins) * size
    head = own_head or lent
    return replace(
        layer,
        layer_params=layer.layer_params + joins,
        head_params=head,
        weight_bytes=layer_bytes + own_head * size,
        read_bytes=layer_bytes + head * size,
    )


def _join_params(drafter: DrafterConfig) -> int:
    """Weights of the joining product, unsharded."""
    return drafter.layers.hidden_size * (len(drafter.inside) or 2) * drafter.hidden


def _wider_attention(drafter: DrafterConfig, tp: int) -> int:
    """Extra weights of EAGLE3: q, k and v read embedding and hidden state."""
    layers, share = drafter.layers, share_of(drafter.layers, fullest(tp))
    heads = len(share.heads) + 2 * len(share.kv_heads)
    return heads * layers.head_dim * layers.hidden_size if drafter.inside else 0


def _without_head(shape: Shape) -> Shape:
    """Drop the head: no logits are read."""
    head_bytes = shape.head_params * shape.element_bytes
    return replace(shape, head_params=0, vocab=0, read_bytes=shape.read_bytes - head_bytes)


def _scaled(model: Fitted, of: Shape, to: Shape) -> Fitted:
    read, kv = to.read_bytes / of.read_bytes, to.kv_bytes / of.kv_bytes
    params, pairs = (
        (to.layer_params + to.head_params) / (of.layer_params + of.head_params),
        to.pair_flops / of.pair_flops,
    )
    return Fitted(
        prefill_step_s=model.prefill_step_s * read,
        prefill_token_s=model.prefill_token_s * to.layer_params / of.layer_params,
        prefill_pair_s=model.prefill_pair_s * pairs,
        decode_step_s=model.decode_step_s * read,
        decode_request_s=model.decode_request_s * params,
        decode_context_s=model.decode_context_s * kv,
    )
