"""Token sampling under temperature, top_k, top_p, min_p; counts for penalties; masks of grammars.

Filter order is temperature, top_k, top_p (renormalized), min_p relative to the best, as in Hugging
Face's generate and vLLM. The lower token id wins ties. Probabilities are multiples of 2**-40 of the
best (fixed_math.mass). The torch functions here define the tokens; sample.c replaces them on CPUs
with a compiler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.core.plan import SlotOpen
from engine.kernels import fixed_math
from engine.kernels.rows import SampledRows, sample_kernel
from engine.kv.page_checksum import GOLDEN, MUL_1, MUL_2, mix, shift, signed
from engine.kv.step_batch import upload

_MASK = (1 << 64) - 1
_SIGN = 1 << 63


def sample_keys(seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Signed 64-bit keys; `positions` count earlier output tokens.

    Sampling noise as a function of (seed, position, token id), with equal bits on all devices. A
    sample is argmax(logit / temperature + noise) (Gumbel-max), so it is equal in any batch or
    process and after a retraction. Bits are SplitMix64's and engine/kernels/fixed_math.py's.
    """
    return [
        (_mix(_mix(seed & _MASK) + (at + 1) * GOLDEN) ^ _SIGN) - _SIGN
        for seed, at in zip(seeds, positions, strict=True)
    ]


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Noise float32[n, m] in [-3.14, 22.88]; int64 keys [n, 1], ids [n or 1, m]."""
    return noise_of(shift(mix(keys + token_ids * signed(GOLDEN)), 32))


def noise_of(bits: torch.Tensor) -> torch.Tensor:
    """float32 -log(-log(1 - u)), u = (bits + 1/2) / 2**32, for int64 bits in [0, 2**32).

    1 - u uses inverted bits, so neither tail loses digits.
    """
    u = (bits.float() + 0.5) * 2.0**-32
    fraction, exponent = fixed_math.split(((0xFFFFFFFF - bits).float() + 0.5) * 2.0**-32)
    fraction = torch.where(exponent == 0, -u, fraction)
    return -fixed_math.log(-fixed_math.log_of_sum(fraction, exponent))


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * MUL_1) & _MASK
    x = ((x ^ (x >> 27)) * MUL_2) & _MASK
    return x ^ (x >> 31)


BLOCK_ELEMENTS = 1 << 18  # rows x vocabulary per block: fits a core's L2 cache
CANDIDATES = (512, 8192)  # ranked before the whole vocabulary: few filters leave more


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Maxima [n] and first indices int64[n] of logits [n, V]; NaN is largest.

    numpy's argmax is vectorized: 0.8 ms instead of 6 for 32 rows of 151,936.
    """
    if logits.device.type != "cpu" or logits.shape[0] == 0:
        best = logits.max(-1)
        return best.values, best.indices
    indices = torch.from_numpy(logits.numpy().argmax(-1))
    return logits.gather(1, indices[:, None])[:, 0], indices


def sample_tokens(logits: Tensor, which: SampledRows) -> Tensor:
    """Sample int64[n] tokens of float32 logits [any, V]; greedy if the best is not finite."""
    kernel = sample_kernel() if logits.device.type == "cpu" else None
    return sample_by_torch(logits, which) if kernel is None else kernel.sample(logits, which)


def sample_by_torch(logits: Tensor, which: SampledRows) -> Tensor:
    """Sample by torch; waits for a GPU."""
    is_filtered = (which.top_k < logits.shape[1]) | (which.top_p < 1.0)
    tokens = which.greedy.clone()
    for sample, chosen in ((_sample_any, ~is_filtered), (_sample_ranked, is_filtered)):
        for at in (chosen & which.best.isfinite()).nonzero()[:, 0].split(max(1, BLOCK_ELEMENTS // logits.shape[1])):
            if len(at):
                tokens[at] = sample(logits[which.rows[at]], which.part(at))
    return tokens


def _sample_any(logits: Tensor, which: SampledRows) -> Tensor:
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
    """Sample from the `most` best; also return bool[n], True where they suffice."""
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
    # keep tokens until the sum before them reaches top_p
    keep = (rank < top_k) & ((running - masses).double() < limit) & (scaled >= which.log_min_p[:, None])
    return _best_score(ids, scaled, which, keep=keep), by_top_k | by_top_p | (most == vocab_size)


def _ranked(logits: Tensor, best: Tensor, temperature: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Ids [n, most], best first, with (logit - best) / temperature.

    Sorts unique integers: float64 bits order like the non-negative gap, and their low 29 bits,
    unused by a float32, take the token id.
    """
    gap = best - logits
    order = gap.double().view(torch.int64) + torch.arange(logits.shape[1], device=logits.device)
    ids = order.topk(most, largest=False, sorted=True).indices
    return ids, gap.gather(1, ids).neg_().div_(temperature)


def _best_score(ids: Tensor, scaled: Tensor, which: SampledRows, *, keep: Tensor) -> Tensor:
    scores = (scaled + gumbel_noise(which.keys[:, None], ids)).masked_fill_(~keep, -torch.inf)
    behind = torch.iinfo(torch.int64).max
    return ids.masked_fill(scores < scores.amax(-1, keepdim=True), behind).amin(-1)


# ---- Token counts for penalties, on the device, without host syncs.


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Penalized `rows` of a batch, and their `states` in the counts, int64[p]."""

    at: list[int]
    rows: torch.Tensor
    states: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


class Penalties:
    def __init__(self, *, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = device
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._free: list[int] = []
        self._state_of: dict[int, int] = {}

    def open(self, slot: SlotOpen) -> None:
        assert slot.slot not in self._state_of, f"slot {slot.slot} is open"
        if not self._free:
            self._grow()
        state = self._state_of[slot.slot] = self._free.pop()
        counts = torch.bincount(torch.tensor(slot.output_ids, dtype=torch.int64), minlength=self._vocab_size)
        seen = counts > 0
        seen[torch.tensor(slot.prompt_ids, dtype=torch.int64)] = True
        self._counts[state].copy_(upload(counts.int(), self._device))
        self._seen[state].copy_(upload(seen, self._device))

    def close(self, slot: int) -> None:
        state = self._state_of.pop(slot, None)
        if state is not None:
            self._free.append(state)

    def rows(self, batch: Sequence[SlotOpen]) -> PenaltyRows | None:
        found = [(i, s) for i, s in enumerate(batch) if s.slot in self._state_of]
        if not found:
            return None
        params = [s.sampling for _, s in found]
        return PenaltyRows(
            at=[i for i, _ in found],
            rows=self._ints([i for i, _ in found]),
            states=self._ints([self._state_of[s.slot] for _, s in found]),
            repetition=self._column([p.repetition_penalty for p in params]),
            frequency=self._column([p.frequency_penalty for p in params]),
            presence=self._column([p.presence_penalty for p in params]),
        )

    def apply(self, logits: torch.Tensor, which: PenaltyRows, drafts: Sequence[int | None] = ()) -> None:
        """Penalize in place, repetition first (raw logit's sign, as in CTRL, Keskar et al. 2019).

        Rows count the `drafts` that they follow, and matter only if these are right.
        """
        x = logits.index_select(0, which.rows)
        counts, seen = self._counts.index_select(0, which.states), self._seen.index_select(0, which.states)
        if ahead := _followed(which.at, drafts):
            row, token = self._ints([p for p, _ in ahead]), self._ints([t for _, t in ahead])
            counts.index_put_((row, token), torch.ones_like(row, dtype=counts.dtype), accumulate=True)
            seen[row, token] = True
        repeated = torch.where(x > 0, x / which.repetition, x * which.repetition)
        x = torch.where(seen, repeated, x)
        x -= which.frequency * counts
        x -= which.presence * (counts > 0)
        logits.index_copy_(0, which.rows, x)

    def count(self, tokens: torch.Tensor, which: PenaltyRows, drafts: Sequence[int | None] = ()) -> None:
        """Count int64[n] sampled tokens; with `drafts` the host waits."""
        states, counted = which.states, tokens.index_select(0, which.rows)
        if any(drafts[i] is not None for i in which.at if drafts):
            right = self._ints(_right(which.at, drafts, tokens.tolist()))
            states, counted = states[right], counted[right]
        at = (states, counted)
        self._counts.index_put_(at, torch.ones_like(counted, dtype=self._counts.dtype), accumulate=True)
        self._seen[at] = True

    def _grow(self) -> None:
        """Double the table: penalties are rare, and a row costs 5 bytes per token id."""
        old = len(self._counts)
        more = min(max(4, old), self._num_slots - old)
        assert more > 0, "more penalised slots open than there are slots"
        self._counts = torch.cat([self._counts, self._counts.new_zeros((more, self._vocab_size))])
        self._seen = torch.cat([self._seen, self._seen.new_zeros((more, self._vocab_size))])
        self._free.extend(reversed(range(old, old + more)))

    def _ints(self, values: list[int]) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.int64), self._device)

    def _column(self, values: list[float]) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.float32), self._device)[:, None]


def _followed(at: list[int], drafts: Sequence[int | None]) -> list[tuple[int, int]]:
    followed: list[tuple[int, int]] = []
    tokens: list[int] = []
    for p, row in enumerate(at if drafts else ()):
        draft = drafts[row]
        tokens = [] if draft is None else [*tokens, draft]
        followed += [(p, token) for token in tokens]
    return followed


def _right(at: list[int], drafts: Sequence[int | None], tokens: list[int]) -> list[int]:
    right: list[int] = []
    follows = True
    for p, row in enumerate(at):
        draft = drafts[row]
        follows = draft is None or (follows and tokens[row - 1] == draft)
        right += [p] if follows else []
    return right


# ---- Bitmasks of allowed tokens on logits: a grammar's device part.

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Rows int64[m] with `bits` int32[m, ceil(V / 32)]: bit t % 32 of word t // 32 allows t."""

    rows: Tensor
    bits: Tensor

    def apply(self, logits: Tensor, *, fallback: Tensor) -> Tensor:
        """A copy of `logits` [n, V] with -inf for forbidden tokens.

        If min_new_tokens has banned all allowed tokens, the row comes from `fallback`.
        """
        allowed = self._allowed(logits.shape[1])
        masked = logits[self.rows].masked_fill(~allowed, -torch.inf)
        if fallback is not logits:
            left = masked.amax(-1, keepdim=True) > -torch.inf
            masked = torch.where(left, masked, fallback[self.rows].masked_fill(~allowed, -torch.inf))
        return masked if len(masked) == len(logits) else logits.index_copy(0, self.rows, masked)

    def _allowed(self, vocab_size: int) -> Tensor:
        if self.bits.device.type == "cpu":
            unpacked = np.unpackbits(self.bits.numpy().view(np.uint8), axis=1, count=vocab_size, bitorder="little")
            return torch.from_numpy(unpacked).view(torch.bool)
        return unpacked_on_device(self.bits, vocab_size)


def unpacked_on_device(bits: Tensor, vocab_size: int) -> Tensor:
    """bool[m, vocab_size]."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab_size].bool()


def token_mask(masks: Mapping[int, bytes], *, device: torch.device) -> TokenMask | None:
    if not masks:
        return None
    assert list(masks) == sorted(masks)
    rows = torch.tensor(list(masks), dtype=torch.int64)
    bits = torch.frombuffer(bytearray(b"".join(masks.values())), dtype=torch.int32).view(len(masks), -1)
    return TokenMask(upload(rows, device), upload(bits, device))
