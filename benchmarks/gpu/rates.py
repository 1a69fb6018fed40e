"""What this GPU gives at best (bytes copied within its memory, bf16 products), and a decode step's sampling."""

from typing import Any

import torch

from benchmarks.gpu.target import QWEN3_8B, TABLE, TINY, Target
from engine.core.plan import SlotOpen
from engine.sampler.sampler import TokenSampler, make_sampler
from engine.sampling_params import SamplingParams

KINDS: dict[str, dict[str, Any]] = TABLE["sampling"]
CONTEXT = 1024  # of the step that a row is compared with


def limits(target: Target) -> dict[str, Any]:
    """Return what the shares of other parts are of."""
    size = target.pick(8 << 30, 1 << 20)
    # random: zeros cost less power, and a memory may compress them
    source = torch.empty(size // 8, dtype=torch.int64, device=target.device).random_()
    goal = torch.empty_like(source)
    copy_ms = target.ms(lambda: goal.copy_(source), flush=False)
    edge = target.pick(8192, 64)
    a, b = (torch.randn(edge, edge, device=target.device).bfloat16() for _ in range(2))
    product_ms = target.ms(lambda: a @ b)
    return {
        "copy_gb_s": 2 * size / copy_ms / 1e6,
        "bf16_tflop_s": 2 * edge**3 / product_ms / 1e9,
        "copy_bytes": size,
        "product_edge": edge,
    }


def sampler(target: Target) -> dict[str, Any]:
    """Measure sampling of a decode step alone, beside a step of the model, and compare its tokens with the CPU's.

    Most chat clients send top_p, so that is the row to look at first.
    """
    shape = target.pick(QWEN3_8B, TINY)
    rows = []
    for batch in target.pick((1, 64, 256), (2,)):
        logits = 4 * torch.randn(batch, shape.vocab, device=target.device)
        step_ms = None
        if "copy_gb_s" in target.limits:
            step_ms = shape.step_bytes(batch=batch, context=CONTEXT) / target.limits["copy_gb_s"] / 1e6
        for kind, flags in KINDS.items():
            row = {"batch": batch, "kind": kind, **_cost(target, logits, flags)}
            row["of_step"] = None if step_ms is None else row["ms"] / step_ms
            rows.append(row)
    return {"vocab": shape.vocab, "context": CONTEXT, "rows": rows}


def _cost(target: Target, logits: torch.Tensor, flags: dict[str, Any]) -> dict[str, Any]:
    on_device, on_cpu = _opened(logits, flags), _opened(logits.cpu(), flags)
    slots, output_lens = list(range(len(logits))), [5] * len(logits)
    tokens, _ = on_device.sample(logits, slots, output_lens)
    same = torch.equal(tokens.cpu(), on_cpu.sample(logits.cpu(), slots, output_lens)[0])
    ms = target.ms(lambda: on_device.sample(logits, slots, output_lens))
    if target.small:
        return {"ms": ms, "tokens_of_cpu": same}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        on_device.sample(logits, slots, output_lens)
        torch.cuda.synchronize()
    launches = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {"ms": ms, "tokens_of_cpu": same, "launches": len(launches)}


def _opened(logits: torch.Tensor, flags: dict[str, Any]) -> TokenSampler:
    batch, vocab = logits.shape
    made = make_sampler(num_slots=batch, vocab_size=vocab, device=logits.device)
    for slot in range(batch):
        sampling = SamplingParams(max_new_tokens=1 << 20, ignore_eos=True, seed=slot, **flags)
        made.open(SlotOpen(slot=slot, sampling=sampling, prompt_ids=[1, 2, 3], output_ids=[], eos_ids=()))
    return made
