"""Builders, and a literal reference: the distribution and the sample written out in numpy for one row at a time."""

import math
from typing import Any

import numpy as np
import torch

from engine.core.plan import SlotOpen
from engine.sampler.sampler import Sampler
from engine.sampling_params import SamplingParams

MASK = (1 << 64) - 1


def slot_open(
    slot: int, *, prompt: list[int] | None = None, output: list[int] | None = None, eos: tuple[int, ...] = (), **kw: Any
) -> SlotOpen:
    kw.setdefault("seed", slot)
    return SlotOpen(
        slot=slot, sampling=SamplingParams(**kw), prompt_ids=prompt or [], output_ids=output or [], eos_ids=eos
    )


def make_sampler(opens: list[SlotOpen], *, vocab_size: int) -> Sampler:
    sampler = Sampler(num_slots=max(o.slot for o in opens) + 1, vocab_size=vocab_size, device="cpu")
    for o in opens:
        sampler.open(o)
    return sampler


def tokens_of(sampler: Sampler, logits: torch.Tensor, slots: list[int], output_lens: list[int]) -> torch.Tensor:
    """[n] tokens of a step; which rows were bad is left out."""
    return sampler.sample(logits, slots, output_lens)[0]


def sample_one(o: SlotOpen, logits: torch.Tensor, output_len: int) -> int:
    """The slot's sample in a batch of its own."""
    sampler = make_sampler([o], vocab_size=len(logits))
    return int(tokens_of(sampler, logits[None], [o.slot], [output_len])[0])


def edited_logits(o: SlotOpen, logits: np.ndarray, output_len: int) -> np.ndarray:
    x = logits.astype(np.float64).copy()
    p = o.sampling
    for t in range(len(x)):
        count = o.output_ids.count(t)
        if count or t in o.prompt_ids:
            x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
        x[t] -= count * p.frequency_penalty + (count > 0) * p.presence_penalty
        x[t] += p.logit_bias.get(t, 0.0)
    if output_len < p.min_new_tokens:
        x[[t for t in (*p.stop_token_ids, *(() if p.ignore_eos else o.eos_ids))]] = -np.inf
    return x


def distribution(o: SlotOpen, logits: np.ndarray, output_len: int = 0) -> np.ndarray:
    """Probability of each token: temperature, top_k, top_p (renormalised), min_p, in this order."""
    p = o.sampling
    x = edited_logits(o, logits, output_len)
    if p.greedy:
        return np.eye(len(x))[int(np.argmax(x))]
    x = x / p.temperature
    order = sorted(range(len(x)), key=lambda t: (-x[t], t))
    if p.top_k > 0:
        order = order[: p.top_k]
    prob = {t: math.exp(x[t] - x[order[0]]) for t in order}
    total, before, kept = sum(prob.values()), 0.0, []
    for t in order:
        if before < p.top_p * total or p.top_p == 1.0:
            kept.append(t)
        before += prob[t]
    kept = [t for t in kept if prob[t] >= p.min_p * prob[order[0]]]
    out = np.zeros(len(x))
    for t in kept:
        out[t] = prob[t]
    return out / out.sum()


def mix(x: int) -> int:
    x &= MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def gumbel(seed: int, position: int, token: int) -> float:
    key = mix(mix(seed) + (position + 1) * 0x9E3779B97F4A7C15)
    bits = mix(key + token * 0x9E3779B97F4A7C15) >> 32
    return -math.log(-math.log1p(-min((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)))


def reference_sample(o: SlotOpen, logits: np.ndarray, output_len: int) -> int:
    """The token that the sampler owes."""
    prob = distribution(o, logits, output_len)
    seed = o.sampling.seed
    assert seed is not None
    scores = [math.log(q) + gumbel(seed, output_len, t) if q > 0 else -math.inf for t, q in enumerate(prob)]
    return int(np.argmax(scores))
