"""Samples one token a row from logits under temperature, top_k, top_p, min_p.

Order of the filters: temperature, top_k, top_p over what top_k left (renormalised), min_p relative to the best token; as in
Hugging Face's generate and vLLM. Of equal logits the lower token id ranks first, else a sample would depend on the batch.
"""

from dataclasses import dataclass

import torch

from engine.sampler.gumbel import gumbel_noise

BLOCK_ELEMENTS = 1 << 18  # rows x vocabulary processed at once on CPU: fits a core's L2 cache
NUCLEUS_CANDIDATES = (512, 8192)  # ranked on CPU before the whole vocabulary: few nuclei are wider


@dataclass(frozen=True, slots=True)
class FilterParams:
    """Parameters of n rows, each [n, 1] on the device. `top_k` int64 (vocabulary size or more: off); rest float32."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor

    def rows(self, at: slice | torch.Tensor) -> "FilterParams":
        return FilterParams(self.temperature[at], self.top_k[at], self.top_p[at], self.log_min_p[at])


def row_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values [n], first index of each [n] int64) of logits [n, V]; a NaN is larger than all.

    On a CPU by numpy, whose argmax uses vectors: 0.8 ms instead of 6 for 32 rows of 151,936.
    """
    if logits.device.type != "cpu" or logits.shape[0] == 0:
        best = logits.max(-1)
        return best.values, best.indices
    indices = torch.from_numpy(logits.numpy().argmax(-1))
    return logits.gather(1, indices[:, None])[:, 0], indices


def sample_any(logits: torch.Tensor, best: torch.Tensor, params: FilterParams, keys: torch.Tensor) -> torch.Tensor:
    """Sample [n] tokens without top_k and top_p. logits [n, V] float32; best [n, 1]: row maxima; keys [n, 1] int64."""
    size = _rows_per_block(logits)
    ids = torch.arange(logits.shape[1], device=logits.device)[None]
    blocks = (slice(i, i + size) for i in range(0, len(logits), size))
    return torch.cat([_sample_block(logits[b], best[b], params.rows(b), keys[b], ids) for b in blocks])


def sample_top_k(
    logits: torch.Tensor, best: torch.Tensor, params: FilterParams, keys: torch.Tensor, *, most: int
) -> torch.Tensor:
    """Sample [n] tokens; every row has a top_k, none above `most`."""
    ids, scaled = _ranked(logits, best, params, min(most, logits.shape[1]))
    weights = scaled.double().exp()
    running = weights.cumsum(-1)
    total = running.gather(1, params.top_k.clamp(max=ids.shape[1]) - 1)
    return _sample_kept(ids, scaled, params, keys, above=running - weights, total=total)


def sample_top_p(logits: torch.Tensor, best: torch.Tensor, params: FilterParams, keys: torch.Tensor) -> torch.Tensor:
    """Sample [n] tokens with top_p and without top_k."""
    total = (logits - best).div_(params.temperature).exp_().sum(-1, dtype=torch.float64, keepdim=True)
    rows = torch.arange(len(logits), device=logits.device)
    tokens = torch.empty_like(rows)
    for most in _widths(logits):
        one = (logits[rows], best[rows], params.rows(rows), keys[rows], total[rows])
        tokens[rows], covered = _top_p_of(*one, most=most)
        if most == logits.shape[1] or covered.all():
            break
        rows = rows[~covered]
    return tokens


def _widths(logits: torch.Tensor) -> list[int]:
    """Return how many candidates to rank, try after try. A GPU gets one try: reading the mass would wait for it."""
    vocab_size = logits.shape[1]
    tries = NUCLEUS_CANDIDATES if logits.device.type == "cpu" else ()
    return [n for n in tries if n < vocab_size] + [vocab_size]


def _top_p_of(
    logits: torch.Tensor,
    best: torch.Tensor,
    params: FilterParams,
    keys: torch.Tensor,
    total: torch.Tensor,
    *,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample [n] tokens from the `most` best; return also [n] whether these hold the whole nucleus."""
    ids, scaled = _ranked(logits, best, params, most)
    weights = scaled.double().exp()
    running = weights.cumsum(-1)
    covered = running[:, -1] >= (params.top_p * total)[:, 0]
    return _sample_kept(ids, scaled, params, keys, above=running - weights, total=total), covered


def _sample_block(
    logits: torch.Tensor, best: torch.Tensor, params: FilterParams, keys: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    scaled = (logits - best).div_(params.temperature)
    scaled.masked_fill_(scaled < params.log_min_p, -torch.inf)
    return scaled.add_(gumbel_noise(keys, ids)).argmax(-1)


def _ranked(
    logits: torch.Tensor, best: torch.Tensor, params: FilterParams, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [n, most], best first, and (logit - best) / temperature of each.

    Sorts integers without equal keys: the bits of the gap to the best as float64 order like the gap (it is not negative),
    and leave the low 29 bits of a float32 value free for the token id.
    """
    gap = best - logits
    order = gap.double().view(torch.int64) + torch.arange(logits.shape[1], device=logits.device)
    ids = order.topk(most, largest=False, sorted=True).indices
    return ids, gap.gather(1, ids).neg_().div_(params.temperature)


def _sample_kept(
    ids: torch.Tensor,
    scaled: torch.Tensor,
    params: FilterParams,
    keys: torch.Tensor,
    *,
    above: torch.Tensor,
    total: torch.Tensor,
) -> torch.Tensor:
    """Sample [n] tokens. `above` [n, m]: mass of the tokens ranked before; `total` [n, 1]: mass that top_p refers to.

    A token is kept while those before it do not reach top_p.
    """
    rank = torch.arange(ids.shape[1], device=ids.device)
    keep = (rank < params.top_k) & (above < params.top_p * total) & (scaled >= params.log_min_p)
    scores = (scaled + gumbel_noise(keys, ids)).masked_fill_(~keep, -torch.inf)
    return ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]


def _rows_per_block(logits: torch.Tensor) -> int:
    if logits.device.type != "cpu":
        return max(1, len(logits))
    return max(1, BLOCK_ELEMENTS // logits.shape[1])
