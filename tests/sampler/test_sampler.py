import numpy as np
import pytest
import torch

from tests.sampler.sampler_cases import distribution, make_sampler, reference_sample, sample_one, slot_open, tokens_of

VOCAB = 40
EOS = (3,)

PARAMS = [
    {"temperature": 0.0},
    {"top_k": 1},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_k": 5, "temperature": 2.0},
    {"top_k": VOCAB},
    {"top_k": 1000},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.95, "temperature": 1.7},
    {"top_k": 8, "top_p": 0.6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"min_p": 0.1, "top_p": 0.9},
    {"min_p": 0.3, "top_k": 6, "temperature": 2.0},
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -1.0, "presence_penalty": 0.7},
    {"presence_penalty": 2.0, "temperature": 0.0},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5, "temperature": 0.0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "top_k": 10},
    {"logit_bias": {7: 100.0}, "temperature": 0.0},
    {"logit_bias": {0: -100.0, 1: 3.5}},
    {"min_new_tokens": 4, "temperature": 0.0},
    {"min_new_tokens": 4, "stop_token_ids": (5, 6), "top_p": 0.8},
    {"min_new_tokens": 4, "ignore_eos": True, "stop_token_ids": (1,)},
]


def logits_for(seed: int, *, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_each_sample_equals_the_literal_reference(params):
    rng = np.random.default_rng(1)
    for trial in range(25):
        prompt, output = rng.integers(0, VOCAB, 12).tolist(), rng.integers(0, VOCAB, trial % 7).tolist()
        logits = logits_for(trial)
        logits[3] += 4.0  # the end token tempts
        o = slot_open(0, prompt=prompt, output=output, eos=EOS, seed=trial * 7919 - 40000, **params)
        assert sample_one(o, logits, len(output)) == reference_sample(o, logits.numpy(), len(output)), (params, trial)


@pytest.mark.parametrize("params", [p for p in PARAMS if p.get("temperature") != 0.0][:16], ids=str)
def test_frequencies_follow_the_distribution(params):
    rows = 4096
    opens = [slot_open(i, **params) for i in range(rows)]
    sampler = make_sampler(opens, vocab_size=VOCAB)
    logits = logits_for(5)
    sampled = tokens_of(sampler, logits.expand(rows, VOCAB).contiguous(), list(range(rows)), [0] * rows)
    expected = distribution(opens[0], logits.numpy()) * rows
    seen = np.bincount(sampled.numpy(), minlength=VOCAB)
    assert not seen[expected == 0].any()
    often = expected >= 5
    chi2 = ((seen[often] - expected[often]) ** 2 / expected[often]).sum()
    freedom = max(int(often.sum()) - 1, 1)
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5 + 4, (chi2, freedom)


def test_successive_positions_of_one_seed_are_independent_samples():
    steps = 4096
    sampler = make_sampler([slot_open(0, seed=11)], vocab_size=4)
    logits = torch.zeros(1, 4)
    tokens = torch.stack([tokens_of(sampler, logits, [0], [i])[0] for i in range(steps)])
    pairs = np.bincount((tokens[:-1] * 4 + tokens[1:]).numpy(), minlength=16)
    assert ((pairs - steps / 16) ** 2 / (steps / 16)).sum() < 15 + 5 * 30**0.5


def test_a_sample_does_not_depend_on_the_batch():
    opens = [slot_open(i, prompt=[i % VOCAB, 2], output=[9], eos=EOS, seed=i * 31, **p) for i, p in enumerate(PARAMS)]
    logits = torch.stack([logits_for(100 + i) for i in range(len(PARAMS))])
    alone = [sample_one(o, logits[i], 3) for i, o in enumerate(opens)]
    sampler = make_sampler(opens, vocab_size=VOCAB)
    n = len(opens)
    together = tokens_of(sampler, logits, list(range(n)), [3] * n).tolist()
    assert together == alone
    # every second one, backwards, without those that count tokens: they have counted one more by now
    few = [i for i in reversed(range(0, n, 2)) if not opens[i].sampling.penalized]
    assert tokens_of(sampler, logits[few], few, [3] * len(few)).tolist() == [alone[i] for i in few]


def test_ties_rank_by_token_id_in_any_batch():
    """Equal logits at the edge of top_k: which of them is kept must not change with a neighbour's larger top_k."""
    logits = torch.zeros(2, 3000)
    logits[:, 1500] = 1.0
    narrow = [slot_open(i, top_k=4, temperature=50.0, seed=i) for i in range(64)]
    alone = [sample_one(o, logits[0], 0) for o in narrow]
    assert set(alone) == {1500, 0, 1, 2}
    for o, token in zip(narrow, alone, strict=True):
        wide = slot_open(99, top_k=2000, seed=1)
        sampler = make_sampler([o, wide], vocab_size=3000)
        assert int(tokens_of(sampler, logits, [o.slot, 99], [0, 0])[0]) == token


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_a_wide_nucleus_in_a_large_vocabulary_equals_the_reference(scale):
    for seed in range(6):
        logits = logits_for(seed, vocab=20000, scale=scale)
        o = slot_open(0, top_p=0.9, seed=seed)
        assert sample_one(o, logits, 2) == reference_sample(o, logits.numpy(), 2)


def test_wide_and_narrow_nuclei_together():
    logits = torch.stack([logits_for(i, vocab=5000, scale=s) for i, s in enumerate([0.01, 8.0, 0.01, 8.0])])
    opens = [slot_open(i, top_p=0.9) for i in range(4)]
    together = tokens_of(make_sampler(opens, vocab_size=5000), logits, [0, 1, 2, 3], [0] * 4).tolist()
    assert together == [sample_one(o, logits[i], 0) for i, o in enumerate(opens)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_after_a_hand_over_equal_the_uninterrupted_run(temperature):
    """Tokens counted on the device step by step, or given at open: the same samples."""
    params = {"temperature": temperature, "frequency_penalty": 0.6, "repetition_penalty": 1.2, "presence_penalty": 0.3}
    prompt = [1, 2, 2, 5]
    steps = [logits_for(200)[None] for _ in range(30)]
    whole = make_sampler([slot_open(0, prompt=prompt, seed=5, **params)], vocab_size=VOCAB)
    tokens = [int(tokens_of(whole, x, [0], [i])[0]) for i, x in enumerate(steps)]
    assert len(set(tokens)) > 5  # penalties move it on
    resumed = make_sampler([slot_open(4, prompt=prompt, output=tokens[:13], seed=5, **params)], vocab_size=VOCAB)
    assert [int(tokens_of(resumed, x, [4], [i])[0]) for i, x in enumerate(steps) if i >= 13] == tokens[13:]
    reference = [
        reference_sample(slot_open(0, prompt=prompt, output=tokens[:i], seed=5, **params), x[0].numpy(), i)
        for i, x in enumerate(steps)
    ]
    assert reference == tokens


def test_counts_of_a_closed_slot_do_not_reach_the_next_one():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 5.0, 4.0
    penalised = {"temperature": 0.0, "presence_penalty": 2.0}
    sampler = make_sampler([slot_open(0, **penalised)], vocab_size=VOCAB)
    assert [int(tokens_of(sampler, logits, [0], [i])[0]) for i in range(2)] == [7, 8]
    sampler.close(0)
    sampler.open(slot_open(0, **penalised))
    assert int(tokens_of(sampler, logits, [0], [0])[0]) == 7


def test_min_new_tokens_lets_the_end_through_when_it_is_reached():
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS[0]], logits[0, 8] = 9.0, 5.0
    sampler = make_sampler([slot_open(0, eos=EOS, temperature=0.0, min_new_tokens=3)], vocab_size=VOCAB)
    assert [int(tokens_of(sampler, logits, [0], [i])[0]) for i in range(5)] == [8, 8, 8, 3, 3]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.5}, {"presence_penalty": 1.0}])
def test_bad_rows_give_token_0_and_leave_the_others_alone(params):
    opens = [slot_open(i, seed=1, **params) for i in range(5)]
    logits = logits_for(3).repeat(5, 1)
    logits[1, 5] = torch.nan
    logits[2] = -torch.inf
    logits[3, 4] = torch.inf
    sampler = make_sampler(opens, vocab_size=VOCAB)
    tokens, bad = sampler.sample(logits, [0, 1, 2, 3, 4], [0] * 5)
    assert bad.tolist() == [False, True, True, True, False]
    good = sample_one(opens[0], logits[0], 0)
    assert tokens.tolist() == [good, 0, 0, 0, good]


def test_logits_are_left_as_they_are():
    opens = [slot_open(i, prompt=[1], eos=EOS, **p) for i, p in enumerate(PARAMS)]
    logits = torch.stack([logits_for(i) for i in range(len(PARAMS))])
    before = logits.clone()
    tokens_of(make_sampler(opens, vocab_size=VOCAB), logits, list(range(len(PARAMS))), [0] * len(PARAMS))
    assert torch.equal(logits, before)
