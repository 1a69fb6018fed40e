"""Samples one token a row from logits under temperature, top_k, top_p, min_p.

Order of the filters: temperature, top_k, top_p over what top_k left (renormalised), min_p relative to the best token; as in
Hugging Face's generate and vLLM. Of equal logits the lower token id ranks first, else a sample would depend on the batch;
of equal scores it wins. Probabilities are whole numbers of 2**-40 of the best token's (fixed_math.mass).

A CPU samples by sample.c. The functions of torch here define the tokens, and serve where there is no compiler.
"""

import torch
from torch import Tensor

from engine.kernels import fixed_math
from engine.kernels.sample import SampledRows, sample_kernel
from engine.sampler.gumbel import gumbel_noise

BLOCK_ELEMENTS = 1 << 18  # rows x vocabulary processed at once: fits a core's L2 cache
CANDIDATES = (512, 8192)  # ranked before the whole vocabulary: few filters leave more


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (values [n], first index of each [n] int64) of logits [n, V]; a NaN is larger than all.

    On a CPU by numpy, whose argmax uses vectors: 0.8 ms instead of 6 for 32 rows of 151,936.
    """
    if logits.device.type != "cpu" or logits.shape[0] == 0:
        best = logits.max(-1)
        return best.values, best.indices
    indices = torch.from_numpy(logits.numpy().argmax(-1))
    return logits.gather(1, indices[:, None])[:, 0], indices


def sample_tokens(logits: Tensor, which: SampledRows) -> Tensor:
    """Sample [n] int64 tokens of the rows `which` of logits [any, V] float32; a best logit that is not finite: the greedy one."""
    kernel = sample_kernel() if logits.device.type == "cpu" else None
    return sample_by_torch(logits, which) if kernel is None else kernel.sample(logits, which)


def sample_by_torch(logits: Tensor, which: SampledRows) -> Tensor:
    """As `sample_tokens`. Waits for a GPU."""
    is_filtered = (which.top_k < logits.shape[1]) | (which.top_p < 1.0)
    tokens = which.greedy.clone()
    for sample, chosen in ((_sample_any, ~is_filtered), (_sample_ranked, is_filtered)):
        for at in (chosen & which.best.isfinite()).nonzero()[:, 0].split(max(1, BLOCK_ELEMENTS // logits.shape[1])):
            if len(at):
                tokens[at] = sample(logits[which.rows[at]], which.part(at))
    return tokens


def _sample_any(logits: Tensor, which: SampledRows) -> Tensor:
    """Rows without top_k and top_p; logits [n, V] of `which`."""
    ids = torch.arange(logits.shape[1], device=logits.device).expand(len(logits), -1)
    scaled = (logits - which.best[:, None]) / which.temperature[:, None]
    return _best_score(ids, scaled, which, keep=scaled >= which.log_min_p[:, None])


def _sample_ranked(logits: Tensor, which: SampledRows) -> Tensor:
    rows, tokens = torch.arange(len(logits), device=logits.device), torch.empty_like(which.greedy)
    for most in [n for n in CANDIDATES if n < logits.shape[1]] + [logits.shape[1]]:
        tokens[rows], covered = _sample_best(logits[rows], which.part(rows), most=most)
        rows = rows[~covered]
        if not len(rows):
            break
    return tokens


def _sample_best(logits: Tensor, which: SampledRows, *, most: int) -> tuple[Tensor, Tensor]:
    """Sample [n] tokens from the `most` best; return also [n] whether these hold all that the filters keep."""
    vocab_size = logits.shape[1]
    best, temperature, top_k = which.best[:, None], which.temperature[:, None], which.top_k[:, None]
    ids, scaled = _ranked(logits, best, temperature, most)
    masses = fixed_math.mass(scaled)
    running = masses.cumsum(-1)
    whole = fixed_math.mass((logits - best) / temperature).sum(-1, keepdim=True)
    total = torch.where(top_k < vocab_size, running.gather(1, top_k.clamp(max=most) - 1), whole)
    limit = which.top_p.double()[:, None] * total.double()
    limit = limit.masked_fill(which.top_p[:, None] >= 1.0, torch.inf)
    by_top_k = (which.top_k < vocab_size) & (which.top_k <= most)
    by_top_p = (which.top_k >= vocab_size) & (running[:, -1].double() >= limit[:, 0])
    rank = torch.arange(most, device=logits.device)
    # a token is kept while those before it do not reach top_p
    keep = (rank < top_k) & ((running - masses).double() < limit) & (scaled >= which.log_min_p[:, None])
    return _best_score(ids, scaled, which, keep=keep), by_top_k | by_top_p | (most == vocab_size)


def _ranked(logits: Tensor, best: Tensor, temperature: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return token ids [n, most], best first, and (logit - best) / temperature of each.

    Sorts integers without equal keys: the bits of the gap to the best as float64 order like the gap (it is not negative),
    and leave the low 29 bits of a float32 value free for the token id.
    """
    gap = best - logits
    order = gap.double().view(torch.int64) + torch.arange(logits.shape[1], device=logits.device)
    ids = order.topk(most, largest=False, sorted=True).indices
    return ids, gap.gather(1, ids).neg_().div_(temperature)


def _best_score(ids: Tensor, scaled: Tensor, which: SampledRows, *, keep: Tensor) -> Tensor:
    """[n]: the token of the best score among those kept; ids, scaled, keep [n, m]."""
    scores = (scaled + gumbel_noise(which.keys[:, None], ids)).masked_fill_(~keep, -torch.inf)
    behind = torch.iinfo(torch.int64).max
    return ids.masked_fill(scores < scores.amax(-1, keepdim=True), behind).amin(-1)
