"""What others reach on this device: the products of a layer alone, and transformers (static cache and torch.compile, paged batching)."""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.products import weights_of
from benchmarks.gpu.target import QWEN3_8B, TINY, Shape, Target
from engine.executor.graphs import CudaCapture

NEW_TOKENS = 32
BLOCK_TOKENS = 256  # of transformers' paged cache


def peer(target: Target) -> dict[str, Any]:
    """A row for each way and batch: milliseconds of a decode step at 1,024 tokens, over the floor of its bytes."""
    shape, batches, context = target.pick((QWEN3_8B, (1, 8, 64), 1024), (TINY, (1, 2), 20))
    found: dict[str, Any] = {"context": context, "rows": []}

    def note(way: str, batch: int, ms: float) -> None:
        row = {"way": way, "batch": batch, "ms": ms, "of_floor": None}
        if "copy_gb_s" in target.limits:
            row["of_floor"] = ms * target.limits["copy_gb_s"] * 1e6 / shape.step_bytes(batch=batch, context=context)
        found["rows"].append(row)
        target.keep(found)

    _products(target, shape, batches, note)
    if find_spec("transformers") is None:
        return {**found, "missing": "transformers is not installed"}
    model = _model(target, shape, context + 2 * NEW_TOKENS)
    for name, way in (("paged", _paged), ("static cache, compiled", _static)):
        try:
            for batch in batches:
                note(f"transformers {name}", batch, way(target, model, batch=batch, context=context))
        except Exception as error:  # a peer that fails leaves the others their figures
            found["error"] = f"{found.get('error', '')} {name}: {type(error).__name__}: {error}".strip()[:600]
    return found


# ---- products


def _products(target: Target, shape: Shape, batches: tuple[int, ...], note: Callable[..., None]) -> None:
    """The products of all layers as one graph: what everyone needs who calls the library, without attention and head."""
    layers = [
        [torch.randn(size, device=target.device).bfloat16() for size in weights_of(shape).values()]
        for _ in range(shape.layers)
    ]
    for batch in batches:
        inputs = {
            size[1]: torch.randn(batch, size[1], device=target.device).bfloat16() for size in weights_of(shape).values()
        }

        def work(inputs: dict[int, Tensor] = inputs) -> None:
            for weights in layers:
                for weight in weights:
                    functional.linear(inputs[weight.shape[1]], weight)

        run = work if target.small else CudaCapture(torch.cuda.Stream(target.device)).capture(work)
        note("products alone", batch, target.ms(run))


# ---- transformers


def _model(target: Target, shape: Shape, context: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields = {name: value for name, value in shape.fields(context=context).items() if name != "architectures"}
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, target.dtype))
    try:
        with target.device:
            return Qwen3ForCausalLM(Qwen3Config(**fields)).eval()
    finally:
        torch.set_default_dtype(before)


def _static(target: Target, model: Any, *, batch: int, context: int) -> float:
    """Milliseconds of a decode step over a static cache, by torch.compile and its graphs."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=context + 2 * NEW_TOKENS)
    ids = torch.randint(16, model.config.vocab_size, (batch, context), device=target.device)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    step = model if target.small else torch.compile(model, mode="reduce-overhead", fullgraph=True)
    tokens, positions = ids[:, -1:], torch.tensor([[context]], device=target.device).expand(batch, 1)

    def run() -> None:
        step(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)

    return target.ms(run, flush=False)


def _paged(target: Target, model: Any, *, batch: int, context: int) -> float:
    """Milliseconds between two tokens, by transformers' continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    prompts = torch.randint(16, model.config.vocab_size, (batch, context)).tolist()
    blocks = batch * (2 + (context + NEW_TOKENS) // BLOCK_TOKENS)
    answers = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=target.pick(8192, 64)),
        record_timestamps=True,
    )
    times = [answer.timestamps for answer in answers.values()]
    if len(times) != batch or any(len(one) < NEW_TOKENS for one in times):
        raise RuntimeError(f"{len(times)} of {batch} answers, of {[len(one) for one in times][:8]} tokens")
    return 1000 * median(now - then for one in times for then, now in pairwise(one[-NEW_TOKENS // 2 :]))
