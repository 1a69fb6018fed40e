"""Sampling of a decode step alone: milliseconds and launches of each kind, beside a step of the model, and the CPU's tokens.

Most chat clients send top_p, so that is the row to look at first.
"""

from typing import Any

import torch

from benchmarks.gpu.target import QWEN3_8B, TINY, Target
from engine.core.plan import SlotOpen
from engine.sampler.make import TokenSampler, make_sampler
from engine.sampling_params import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
}
CONTEXT = 1024  # of the step that a row is compared with


def measure(target: Target) -> dict[str, Any]:
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
    sampler, on_cpu = _opened(logits, flags), _opened(logits.cpu(), flags)
    slots, output_lens = list(range(len(logits))), [5] * len(logits)
    tokens, _ = sampler.sample(logits, slots, output_lens)
    same = torch.equal(tokens.cpu(), on_cpu.sample(logits.cpu(), slots, output_lens)[0])
    ms = target.ms(lambda: sampler.sample(logits, slots, output_lens))
    if target.small:
        return {"ms": ms, "tokens_of_cpu": same}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        sampler.sample(logits, slots, output_lens)
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {"ms": ms, "tokens_of_cpu": same, "launches": len(on_device)}


def _opened(logits: torch.Tensor, flags: dict[str, Any]) -> TokenSampler:
    batch, vocab = logits.shape
    sampler = make_sampler(num_slots=batch, vocab_size=vocab, device=logits.device)
    for slot in range(batch):
        sampling = SamplingParams(max_new_tokens=1 << 20, ignore_eos=True, seed=slot, **flags)
        sampler.open(SlotOpen(slot=slot, sampling=sampling, prompt_ids=[1, 2, 3], output_ids=[], eos_ids=()))
    return sampler
