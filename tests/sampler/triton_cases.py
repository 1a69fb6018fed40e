"""Run by test_triton_sampler.py with TRITON_INTERPRET=1 (it must be set before kernels are defined).

Triton's sampler beside `Sampler`: the same tokens and bad rows, in mixed batches of all that a request can ask for.
"""

import itertools
import random
import sys

import torch
import triton
import triton.language as tl
from torch import Tensor

import tests.triton_interpreter  # noqa: F401 (before kernels run)
from engine.core.plan import SlotOpen
from engine.grammar.token_rules import rules_of
from engine.kernels.triton import noise, sample
from engine.sampler.logprobs import log_norms
from engine.sampler.sampler import NOT_SAMPLED, Sampler
from engine.sampler.sampling import TokenMask, noise_of, token_mask
from engine.sampler.triton_sampler import TritonSampler
from engine.sampling_params import SamplingParams
from tests.sampler.sampler_cases import slot_open
from tests.sampler.test_noise import extreme_bits, random_bits
from tests.sampler.test_sample_kernel import many_logits
from tests.sampler.test_sampler import PARAMS

VOCAB = 300
CPU = torch.device("cpu")


@triton.jit
def noise_kernel(bits_ptr, noise_ptr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, TILE)
    tl.store(noise_ptr + at, noise.noise_of(tl.load(bits_ptr + at).to(tl.uint32)))


def check_noise() -> None:
    bits = torch.cat([random_bits(1 << 13), extreme_bits()])
    bits = bits[: 1 << (len(bits).bit_length() - 1)]
    found = torch.empty(len(bits))
    noise_kernel[(1,)](bits, found, TILE=len(bits))
    assert torch.equal(found, noise_of(bits))


class Both:
    """Both samplers with the same slots open."""

    def __init__(self, opens: list[SlotOpen], vocab_size: int) -> None:
        sizes = {"num_slots": len(opens), "vocab_size": vocab_size, "device": "cpu"}
        self.opens, self.cpu, self.gpu = opens, Sampler(**sizes), TritonSampler(**sizes)
        for o in opens:
            self.cpu.open(o)
            self.gpu.open(o)

    def check(self, logits: Tensor, slots: list[int], output_lens: list[int], mask: TokenMask | None = None) -> Tensor:
        before = logits.clone()
        expected, expected_bad = self.cpu.sample(logits, slots, output_lens, mask=mask)
        tokens, bad = self.gpu.sample(logits, slots, output_lens, mask=mask)
        wrong = [(self.opens[slots[i]].sampling, i) for i in (tokens != expected).nonzero()[:, 0].tolist()]
        assert not wrong, (wrong, tokens, expected)
        assert torch.equal(bad, expected_bad)
        assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "the logits were changed"
        return tokens


def check_filters() -> None:
    """Ties, infinities, NaN, one value throughout; top_k at and beyond what is finite, top_p at its edges."""
    base = many_logits(VOCAB)
    kinds = list(
        itertools.product(range(len(base)), (0.05, 1.0, 40.0), (-1, 2, 20, 200), (1.0, 0.999, 0.5, 1e-6), (0.0, 0.05))
    )
    kinds = random.Random(3).sample(kinds, 24) + [(row, 1.0, 2, 1.0, 0.0) for row in (4, 4, 4, 4, 4, 3)]
    opens = [
        slot_open(i, seed=i * 7919 - 5, temperature=t, top_k=k, top_p=p, min_p=m)
        for i, (_, t, k, p, m) in enumerate(kinds)
    ]
    Both(opens, VOCAB).check(torch.stack([base[kind[0]] for kind in kinds]), list(range(len(opens))), [3] * len(opens))


def check_mixed_batches() -> None:
    """Greedy, filters, penalties, biases and min_new_tokens side by side, over steps: what was counted counts."""
    generator = torch.Generator().manual_seed(4)
    opens = [slot_open(i, prompt=[i, 2, 2], output=[9, 9], eos=(3,), seed=i * 31, **p) for i, p in enumerate(PARAMS)]
    both = Both(opens, VOCAB)
    slots = list(range(len(opens)))
    logits = torch.randn(len(opens), VOCAB, generator=generator) * 2
    logits[:, 3] += 8.0  # the end token tempts
    chosen = [both.check(logits, slots, [at] * len(slots)) for at in (2, 3)]
    assert (torch.stack(chosen)[:, [i for i, p in enumerate(PARAMS) if "min_new_tokens" in p]] != 3).any()
    few = slots[-6::2]
    both.check(logits[few], few, [4] * len(few))  # min_new_tokens is reached
    for used in (both.cpu, both.gpu):
        used.close(5)
        used.open(slot_open(5, presence_penalty=2.0, seed=8))
    both.check(logits[[5]], [5], [0])


def check_masks() -> None:
    """A mask over plain and edited rows; one allows only tokens that min_new_tokens bans."""
    opens = [
        slot_open(0, seed=1),
        slot_open(1, temperature=0.0),
        slot_open(2, min_new_tokens=5, stop_token_ids=(6,), eos=(3,), repetition_penalty=1.5, output=[3]),
        slot_open(3, top_p=0.7, logit_bias={40: 50.0}, seed=2),
        slot_open(4, min_new_tokens=5, eos=(3,), temperature=0.0),
    ]
    allowed = {0: range(200, 300), 2: (3, 6), 3: (7, 40, 41), 4: (3, 8)}
    masks = {row: _bits(tokens) for row, tokens in allowed.items()}
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(6))
    tokens = Both(opens, VOCAB).check(logits, [0, 1, 2, 3, 4], [1] * 5, token_mask(masks, device=CPU)).tolist()
    assert all(tokens[row] in allowed[row] for row in allowed) and tokens[4] == 8, tokens


def check_token_rules() -> None:
    """Rules of tokens over steps, beside penalties, biases and a minimum: kept by both, which sample the same."""
    params = [
        SamplingParams(seed=1, allowed_token_ids=tuple(range(5, 12))),
        SamplingParams(seed=2, bad_token_ids=((7,), (8, 9), (5, 5, 5)), logit_bias={5: 40.0, 8: 39.0}),
        SamplingParams(temperature=0.0, bad_token_ids=((7,), (8, 9)), repetition_penalty=1.4, min_new_tokens=6),
        SamplingParams(seed=4, allowed_token_ids=(3, 4), bad_token_ids=((3, 3), (4, 4)), top_p=0.6),
    ]
    rules = [rules_of(p, None, vocab_size=VOCAB) for p in params]
    both = Both([SlotOpen(i, p, [1, 2], [], (3,)) for i, p in enumerate(params)], VOCAB)
    answers: list[list[int]] = [[] for _ in params]
    for step in range(8):
        logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(step)) * 3
        logits[:, 7] += 30.0
        masks = {row: rule.bitmask() for row, rule in enumerate(rules) if rule is not None}
        rows = list(range(len(params)))
        for row, token in enumerate(
            both.check(logits, rows, [step] * len(rows), token_mask(masks, device=CPU)).tolist()
        ):
            answers[row].append(token)
            rule = rules[row]
            assert rule is not None and rule.accept(token)
    for answer, p in zip(answers, params, strict=True):
        assert not p.allowed_token_ids or set(answer) <= set(p.allowed_token_ids), answer
        for word in p.bad_token_ids:
            assert not any(tuple(answer[i : i + len(word)]) == word for i in range(len(answer))), (answer, word)
    assert answers[1].count(5) > 3 and answers[3][:2] in ([3, 4], [4, 3]), answers


def _bits(tokens: "range | tuple[int, ...]") -> bytes:
    words = bytearray(-(-VOCAB // 32) * 4)
    for t in tokens:
        words[t // 8] |= 1 << (t % 8)
    return bytes(words)


def check_rows_that_are_not_sampled() -> None:
    penalized = {"temperature": 0.0, "presence_penalty": 2.0}
    both = Both([slot_open(0, **penalized), slot_open(1, temperature=0.0)], VOCAB)
    logits = torch.zeros(3, VOCAB)
    logits[:, 7], logits[:, 8] = 5.0, 4.0
    slots = torch.tensor([0, 1, 2])  # 2: padding
    for lens, expected in (
        ([NOT_SAMPLED, 0, NOT_SAMPLED], [0, 7, 0]),
        ([0, 0, -1], [7, 7, 0]),
        ([1, 1, -1], [8, 7, 0]),
    ):
        tokens, bad = both.gpu.sample_on_device(logits, slots, torch.tensor(lens))
        assert tokens.tolist() == expected and not bad.any(), (lens, tokens)


def check_logprobs() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(7)) * 5
    torch.testing.assert_close(sample.log_norms(logits), log_norms(logits), rtol=0, atol=1e-5)


def main() -> None:
    torch.set_num_threads(1)
    check_noise()
    sample.PARTS, sample.TILE, sample.ROW_TILE = 2, 128, 256  # a program walks several tiles
    check_filters()
    check_mixed_batches()
    check_masks()
    check_token_rules()
    check_rows_that_are_not_sampled()
    check_logprobs()


if __name__ == "__main__":
    main()
    sys.exit(0)
