"""sample.c against torch, to the token: random logits, ties, infinities, every filter and edge."""

import itertools

import pytest
import torch
from torch import Tensor

from engine.kernels.rows import SampledRows, sample_kernel
from engine.sampler.sampling import row_max, sample_by_torch, sample_tokens

TEMPERATURES, TOP_P, MIN_P = (0.05, 1.0, 40.0), (1.0, 0.999, 0.5, 1e-6), (-torch.inf, -3.0, 0.0)


def rows_of(logits: Tensor, *, temperature: float, top_k: int, top_p: float, log_min_p: float) -> SampledRows:
    n, vocab_size = logits.shape
    best, greedy = row_max(logits)
    rows = torch.arange(n - 1, -1, -1)  # rows of the logits in any order
    return SampledRows(
        rows=rows,
        best=best[rows],
        greedy=greedy[rows],
        keys=torch.randint(-(2**63), 2**63 - 1, (n,), generator=torch.Generator().manual_seed(top_k)),
        temperature=torch.full((n,), temperature),
        top_k=torch.full((n,), min(top_k, vocab_size)),
        top_p=torch.full((n,), top_p),
        log_min_p=torch.full((n,), log_min_p),
    )


def many_logits(vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    rows = torch.randn(9, vocab_size, generator=generator) * torch.tensor([0.01, 1, 6, 1, 1, 1, 1, 1, 1])[:, None]
    rows[3] = rows[3].bfloat16().float()  # ties
    rows[4] = 0.0
    rows[5, ::2] = -torch.inf
    rows[6] = -torch.inf
    rows[7, -1] = torch.inf
    rows[8, vocab_size // 2] = torch.nan
    return rows


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 700, 9001])
def test_the_kernel_samples_the_tokens_of_torch(vocab_size: int) -> None:
    kernel, logits = sample_kernel(), many_logits(vocab_size)
    assert kernel is not None
    ks = sorted({k for k in (1, 2, 20, 600, vocab_size - 1, vocab_size) if 0 < k <= vocab_size})
    for temperature, top_k, top_p, log_min_p in itertools.product(TEMPERATURES, ks, TOP_P, MIN_P):
        which = rows_of(logits, temperature=temperature, top_k=top_k, top_p=top_p, log_min_p=log_min_p)
        expected = sample_by_torch(logits, which)
        assert torch.equal(kernel.sample(logits, which), expected), (temperature, top_k, top_p, log_min_p)


def test_logits_may_be_a_view() -> None:
    wide = many_logits(701)
    logits = wide[1::2, 1:]
    which = rows_of(logits, temperature=1.0, top_k=30, top_p=0.9, log_min_p=-torch.inf)
    assert torch.equal(sample_tokens(logits, which), sample_by_torch(logits.contiguous(), which))


def test_many_threads_sample_the_same() -> None:
    logits = many_logits(5000)
    which = rows_of(logits, temperature=1.0, top_k=5000, top_p=0.9, log_min_p=-torch.inf)
    alone = sample_tokens(logits, which)
    torch.set_num_threads(3)
    assert torch.equal(sample_tokens(logits, which), alone)
