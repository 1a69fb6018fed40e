"""Bytes of weights and KV pages, and the pages that fit. Pure."""

from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.core.plan import Plan
from engine.device.memory_plan import MeasuredMemory, static_left
from engine.flags.resolve import num_pages
from engine.kv.cache_spec import page_bytes_of
from engine.model_files.drafter_config import STANDALONE, DrafterConfig
from engine.model_files.model_config import ModelConfig
from engine.models.cache_specs import drafter_specs, layer_spec
from engine.parallel.layout import check_layout, share_of
from planner.step_time import Fitted, Roofline, Shape, StepLoad, StepTime, fullest, load_of, shape_of
from service.flags import ConfigError

# ---- Cost of a drafting model. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTime:
    """Times of a drafter: of its layers in a step of the model, of a pass (a token per request),
    and the overhead of a draft step.
    """

    beside: StepTime
    a_pass: StepTime
    step_s: float


def plan_seconds(plan: Plan, model: StepTime, drafter: DrafterTime | None) -> float:
    """A drafter also processes the model's tokens."""
    if plan.skips_model:
        assert drafter is not None, "a plan asks a drafter, and there is none"
        return drafter.step_s + sum(drafter.a_pass.seconds(load) for load in pass_loads(plan))
    load = load_of(plan)
    return model.seconds(load) + (0.0 if drafter is None else drafter.beside.seconds(load))


def pass_loads(plan: Plan) -> list[StepLoad]:
    """One row per unfinished request."""
    loads = []
    for number in range(max(item.to_draft for item in plan.items)):
        left = [item for item in plan.items if item.to_draft > number]
        context = sum(item.start + 1 + number for item in left)
        loads.append(StepLoad(decodes=len(left), decode_context=context, samples=len(left)))
    return loads


def by_roofline(model: Roofline, shape: Shape) -> DrafterTime:
    """A pass has its layers' share of the overhead."""
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
    """The shape on the fullest GPU, with its own or the model's head."""
    drafter, lent = model.drafter, shape_of(model, tp, on_cpu=on_cpu).head_params
    assert drafter is not None
    if drafter.kind == STANDALONE:
        return shape_of(drafter.layers, tp, on_cpu=on_cpu)
    layer = shape_of(replace(drafter.layers, num_layers=1, nextn_layers=0), tp, on_cpu=on_cpu)
    size, own_head = layer.element_bytes, -(-drafter.head_rows // tp) * layer.hidden
    joins = drafter.layers.hidden_size * (len(drafter.inside) or 2) * drafter.hidden  # unsharded
    joins += _wider_attention(drafter, tp)
    layer_bytes = layer.read_bytes - (layer.head_params - joins) * size
    head = own_head or lent
    return replace(
        layer,
        layer_params=layer.layer_params + joins,
        head_params=head,
        weight_bytes=layer_bytes + own_head * size,
        read_bytes=layer_bytes + head * size,
    )


def _wider_attention(drafter: DrafterConfig, tp: int) -> int:
    """Extra weights of EAGLE3: q, k and v read embedding and hidden state."""
    layers, share = drafter.layers, share_of(drafter.layers, fullest(tp))
    heads = len(share.heads) + 2 * len(share.kv_heads)
    return heads * layers.head_dim * layers.hidden_size if drafter.inside else 0


def _without_head(shape: Shape) -> Shape:
    head_bytes = shape.head_params * shape.element_bytes
    return replace(shape, head_params=0, vocab=0, read_bytes=shape.read_bytes - head_bytes)


def _scaled(model: Fitted, of: Shape, to: Shape) -> Fitted:
    read, kv = to.read_bytes / of.read_bytes, to.kv_bytes / of.kv_bytes
    params = (to.layer_params + to.head_params) / (of.layer_params + of.head_params)
    pairs = to.pair_flops / of.pair_flops
    return Fitted(
        prefill_step_s=model.prefill_step_s * read,
        prefill_token_s=model.prefill_token_s * to.layer_params / of.layer_params,
        prefill_pair_s=model.prefill_pair_s * pairs,
        decode_step_s=model.decode_step_s * read,
        decode_request_s=model.decode_request_s * params,
        decode_context_s=model.decode_context_s * kv,
    )


# ---- memory

DEGREES = (1, 2, 4, 8, 16, 32)  # of TP


def page_bytes(model: ModelConfig, tp: int = 1, *, page_size: int) -> int:
    """On the fullest GPU, with the drafter's."""
    place = fullest(tp)
    specs = [layer_spec(model, share_of(model, place), dtype=model.dtype)] * model.num_layers
    if model.drafter is not None:
        specs += drafter_specs(model.drafter, place, dtype=model.dtype)
    return page_bytes_of(specs, page_size)


def weight_bytes(model: ModelConfig, tp: int = 1, *, on_cpu: bool = False) -> int:
    own = shape_of(model, tp, on_cpu=on_cpu).weight_bytes
    return own if model.drafter is None else own + drafter_shape(model, tp, on_cpu=on_cpu).weight_bytes


def kv_pages(
    engine: EngineConfig,
    model: ModelConfig,
    *,
    tp: int,
    memory_bytes: int | None,
    gpu: str,
    longest: int,
    on_cpu: bool = False,
) -> int:
    """A worker's KV pages on `tp` GPUs. Raises ConfigError.

    `memory_bytes` is None with --max-total-tokens. `gpu`: the flag. `longest`: request tokens.
    """
    weights = weight_bytes(model, tp, on_cpu=on_cpu)
    kv_bytes = 0 if memory_bytes is None else _left_for_kv(engine, weights, memory_bytes=memory_bytes)
    if memory_bytes is not None and kv_bytes <= 0:
        raise ConfigError(
            f"{gpu}: {_gb(tp * memory_bytes)} GB{f' on {tp} GPUs' if tp > 1 else ''} do not hold the model's "
            f"{_gb(weight_bytes(model, on_cpu=on_cpu))} GB of weights; "
            f"{_advice(engine, model, memory_bytes=memory_bytes, longest=longest, on_cpu=on_cpu)}"
        )
    return num_pages(engine, page_bytes=page_bytes(model, tp, page_size=engine.page_size), kv_bytes=kv_bytes)


def _advice(engine: EngineConfig, model: ModelConfig, *, memory_bytes: int, longest: int, on_cpu: bool) -> str:
    for tp in filter(lambda tp: _fits(model, tp), DEGREES):
        pages = -(-longest // engine.page_size)
        left = _left_for_kv(engine, weight_bytes(model, tp, on_cpu=on_cpu), memory_bytes=memory_bytes)
        if left >= pages * page_bytes(model, tp, page_size=engine.page_size):
            return f"--tp-size {tp} does, with the longest request's KV ({longest:,} tokens): {tp} GPUs a worker"
    return "take a larger GPU: no --tp-size that divides the model is enough"


def _fits(model: ModelConfig, tp: int) -> bool:
    try:
        for held in (model, *([model.drafter.layers] if model.drafter else [])):
            check_layout(held, tp_size=tp, pp_size=1)
    except ConfigError:
        return False
    return True


def _left_for_kv(engine: EngineConfig, weights: int, *, memory_bytes: int) -> int:
    found = MeasuredMemory(
        memory=memory_bytes,
        free=memory_bytes,
        weights=weights,
        prompts=0,
        token_bytes=0,
        samples=0,
        graphs=0,
        on_gpu=True,
    )
    return static_left(engine, found)


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.0f}"
