"""Logprobs of a batch against float64, and their bits in any batch."""

import numpy as np
import torch
from torch import Tensor

from engine.sampler.logprobs import Packed, log_norms, packed_logprobs

VOCAB = 40


def logits_of(rows: int, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3


def packed_of(logits: Tensor, tokens: Tensor, *, top_num: int, asked: list[list[int]]) -> Packed:
    token_ids = torch.tensor(asked, dtype=torch.int64).view(len(tokens), -1)
    table = packed_logprobs(logits, tokens, top_num=top_num, token_ids=token_ids)
    return Packed(table, most=min(top_num, logits.shape[1]))


def test_each_row_takes_its_own_part_of_the_table() -> None:
    logits, tokens = logits_of(3), torch.tensor([4, 39, 0])
    expected = logits.double().log_softmax(-1)
    packed = packed_of(logits, tokens, top_num=4, asked=[[7, 8], [9, 0], [0, 0]])
    for row, (top_num, ids) in enumerate([(4, (7, 8)), (2, (9,)), (0, ())]):
        found = packed.rows(row, row + 1, top_num=top_num, requested_ids=ids)
        best = expected[row].topk(top_num)
        assert found.token_ids.tolist() == [tokens[row]] and found.top_ids.tolist() == [best.indices.tolist()]
        for values, exact in (
            (found.chosen, expected[row, tokens[row]]),
            (found.top_values[0], best.values),
            (found.requested[0], expected[row, list(ids)]),
        ):
            np.testing.assert_allclose(values, exact.expand(len(values)), rtol=0, atol=1e-5)


def test_many_rows_of_one_prompt_and_more_alternatives_than_tokens() -> None:
    logits = logits_of(5)
    found = packed_of(logits, torch.arange(5), top_num=99, asked=[[]] * 5).rows(0, 5, top_num=99, requested_ids=())
    assert found.top_ids.shape == (5, VOCAB) and found.requested.shape == (5, 0)
    assert found.top_ids.tolist() == logits.topk(VOCAB).indices.tolist()
    np.testing.assert_allclose(found.chosen, logits.double().log_softmax(-1).diagonal(), rtol=0, atol=1e-5)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    logits = logits_of(9, 50000)
    torch.set_num_threads(2)
    assert torch.equal(log_norms(logits)[3:4], log_norms(logits[3:4].clone()))
