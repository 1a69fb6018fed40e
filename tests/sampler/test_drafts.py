"""Rows of one request in a step are sampled as they would be one by one: penalties count the drafts before a row, and then what was right."""

import pytest
import torch

from engine.core.plan import SlotOpen
from engine.sampler.sampler import Sampler
from engine.sampling_params import SamplingParams

VOCAB = 32
PENALTIES = {"repetition_penalty": 1.7, "frequency_penalty": 0.9, "presence_penalty": 0.6}


def sampler_with(**sampling: object) -> Sampler:
    sampler = Sampler(num_slots=2, vocab_size=VOCAB, device="cpu")
    params = SamplingParams(seed=5, **sampling)  # type: ignore[arg-type]
    for slot in (0, 1):
        sampler.open(SlotOpen(slot, params, [1, 2, 3], [4], ()))
    return sampler


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong_at", [None, 0, 2])
def test_rows_with_drafts_equal_rows_one_by_one(temperature: float, wrong_at: int | None) -> None:
    """And so does the step after them, whether a draft was wrong or none; the other request is untouched."""
    sampling = {**PENALTIES, "temperature": temperature}
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3))
    alone = sampler_with(**sampling)
    one_by_one = [alone.sample(logits[i : i + 1], [0], [1 + i])[0].item() for i in range(5)]
    drafts = one_by_one[:3]
    if wrong_at is not None:
        drafts[wrong_at] = (drafts[wrong_at] + 1) % VOCAB
    together = sampler_with(**sampling)
    rows = torch.cat((logits[7:8], logits[:4]))
    tokens, _ = together.sample(rows, [1, 0, 0, 0, 0], [1, 1, 2, 3, 4], drafts=[None, None, *drafts])
    right = 3 if wrong_at is None else wrong_at
    assert tokens[1:].tolist()[: right + 1] == one_by_one[: right + 1]
    then, _ = together.sample(logits[right + 1 : right + 2], [0], [2 + right])
    assert then.item() == one_by_one[right + 1]
    assert tokens[0] == sampler_with(**sampling).sample(logits[7:8], [1], [1])[0]


def test_a_row_behind_other_drafts_has_other_penalties() -> None:
    """Without the count of its drafts the row would repeat them."""
    logits = torch.zeros(2, VOCAB)
    logits[:, 9], logits[:, 8] = 1.0, 0.9
    sampler = sampler_with(temperature=0.0, presence_penalty=1.0)
    assert sampler.sample(logits, [0, 0], [1, 2], drafts=[None, 9])[0].tolist() == [9, 8]


def test_accepted_drafts_have_the_frequencies_of_the_model() -> None:
    """20,000 seeds: the first token, and behind a draft that was right the second one, are as likely as the model says."""
    seeds, slots, draft = 20_000, 500, 3
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(7))
    logits[0, draft] = 2.5
    rows = logits.repeat(slots, 1)
    first, second = torch.zeros(VOCAB), torch.zeros(VOCAB)
    for begin in range(0, seeds, slots):
        sampler = Sampler(num_slots=slots, vocab_size=VOCAB, device="cpu")
        for slot in range(slots):
            sampler.open(SlotOpen(slot, SamplingParams(seed=begin + slot, temperature=1.0), [1], [], ()))
        both = [slot for slot in range(slots) for _ in range(2)]
        tokens, _ = sampler.sample(rows, both, [0, 1] * slots, drafts=[None, draft] * slots)
        first += torch.bincount(tokens[0::2], minlength=VOCAB)
        second += torch.bincount(tokens[1::2][tokens[0::2] == draft], minlength=VOCAB)
    assert second.sum() == first[draft] > 2000
    for counts, row in ((first, logits[0]), (second, logits[1])):
        expected = counts.sum() * row.softmax(-1)
        assert float(((counts - expected) ** 2 / expected).sum()) / (VOCAB - 1) < 1.6
