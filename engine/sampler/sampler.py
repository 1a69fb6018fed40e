"""Sampling without host syncs.

Logits are edited (penalties, logit_bias, min_new_tokens, grammar mask), sampled and counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.core.plan import SlotOpen
from engine.kernels.rows import SampledRows, sample_kernel, takes_triton
from engine.kv.step_batch import upload
from engine.sampler.sampling import Penalties, PenaltyRows, TokenMask, row_max, sample_keys, sample_tokens
from engine.sampling_params import SamplingParams


class Sampler:
    """Results depend only on (seed, output_len, the row's logits).

    One thread calls in stream order: `open` before a slot's first `sample`, `close` after its last.
    """

    def __init__(self, *, num_slots: int, vocab_size: int, device: str | torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._penalties = Penalties(num_slots=num_slots, vocab_size=vocab_size, device=self._device)
        self._slots: dict[int, SlotOpen] = {}
        self._batch: _Batch | None = None
        if self._device.type == "cpu":
            sample_kernel()  # built here, not in the first step

    def open(self, slot: SlotOpen) -> None:
        assert slot.slot not in self._slots, f"slot {slot.slot} is open"
        self._slots[slot.slot] = slot
        self._batch = None
        if slot.sampling.penalized:
            self._penalties.open(slot)

    def close(self, slot: int) -> None:
        del self._slots[slot]
        self._batch = None
        self._penalties.close(slot)

    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        output_lens: Sequence[int],
        *,
        mask: TokenMask | None = None,
        drafts: Sequence[int | None] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample int64[n] tokens; also return bool[n], True for bad rows.

        logits float32[n, V] stay unchanged; `output_lens` count earlier tokens. A row with NaN or
        +inf, or only -inf, is bad and gives 0. `drafts`: per row the draft that it follows.
        """
        assert logits.shape == (len(slots), self._vocab_size), (logits.shape, len(slots), self._vocab_size)
        assert logits.dtype == torch.float32, logits.dtype
        batch = self._batch_of(slots)
        values, indices = row_max(logits)
        bad = ~values.isfinite()
        edited = self._edited(logits, batch, output_lens, drafts)
        if mask is not None:
            edited = mask.apply(edited, fallback=logits)
        if edited is not logits:
            values, indices = row_max(edited)
        tokens = self._sampled(edited, values, indices, batch, output_lens)
        tokens = tokens.masked_fill(bad, 0)
        if batch.penalties is not None:
            self._penalties.count(tokens, batch.penalties, drafts)
        return tokens, bad

    def guess(self, logits: torch.Tensor, slots: Sequence[int], output_lens: Sequence[int]) -> torch.Tensor:
        batch = self._batch_of(slots)
        edited = self._edited(logits, batch, output_lens, ())
        values, indices = row_max(edited)
        return self._sampled(edited, values, indices, batch, output_lens).masked_fill(~values.isfinite(), 0)

    def _edited(
        self, logits: torch.Tensor, batch: "_Batch", output_lens: Sequence[int], drafts: Sequence[int | None]
    ) -> torch.Tensor:
        banned = batch.banned(output_lens)
        if batch.penalties is None and batch.bias is None and not banned:
            return logits
        logits = logits.clone()
        if batch.penalties is not None:
            self._penalties.apply(logits, batch.penalties, drafts)
        if batch.bias is not None:
            logits.index_put_(*batch.bias, accumulate=True)
        if banned:
            rows, ids = (self._upload(x, torch.int64) for x in zip(*banned, strict=True))
            logits[rows, ids] = -torch.inf
        return logits

    def _sampled(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        greedy: torch.Tensor,
        batch: "_Batch",
        output_lens: Sequence[int],
    ) -> torch.Tensor:
        sampled = batch.sampled
        if sampled is None:
            return greedy
        keys = sample_keys(sampled.seeds, [output_lens[i] for i in sampled.at])
        tokens = sample_tokens(
            logits,
            SampledRows(
                rows=sampled.rows,
                best=best[sampled.rows],
                greedy=greedy[sampled.rows],
                keys=self._upload(keys, torch.int64),
                temperature=sampled.temperature,
                top_k=sampled.top_k,
                top_p=sampled.top_p,
                log_min_p=sampled.log_min_p,
            ),
        )
        return greedy.index_copy(0, sampled.rows, tokens)

    def _batch_of(self, slots: Sequence[int]) -> "_Batch":
        key = tuple(slots)
        if self._batch is None or self._batch.slots != key:
            opens = [self._slots[s] for s in key]
            self._batch = _Batch(
                slots=key,
                opens=opens,
                penalties=self._penalties.rows(opens),
                bias=self._bias(opens),
                sampled=self._sampled_rows(opens),
                wait_for_end=[(i, s) for i, s in enumerate(opens) if s.sampling.min_new_tokens > 0],
            )
        return self._batch

    def _bias(self, opens: list[SlotOpen]) -> "_Bias | None":
        cells = [(i, t, b) for i, s in enumerate(opens) for t, b in s.sampling.logit_bias.items()]
        if not cells:
            return None
        rows, ids, values = zip(*cells, strict=True)
        at = self._upload(rows, torch.int64), self._upload(ids, torch.int64)
        return at, self._upload(values, torch.float32)

    def _sampled_rows(self, opens: list[SlotOpen]) -> "_Sampled | None":
        at = [i for i, s in enumerate(opens) if not s.sampling.greedy]
        if not at:
            return None
        params = [opens[i].sampling for i in at]
        return _Sampled(
            at=at,
            rows=self._upload(at, torch.int64),
            seeds=[seed_of(opens[i]) for i in at],
            temperature=self._upload([p.temperature for p in params], torch.float32),
            top_k=self._upload([top_k_of(p, self._vocab_size) for p in params], torch.int64),
            top_p=self._upload([p.top_p for p in params], torch.float32),
            log_min_p=self._upload([log_min_p_of(p) for p in params], torch.float32),
        )

    def _upload(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=dtype), self._device)


_Bias = tuple[tuple[Tensor, Tensor], Tensor]  # (rows, token ids), and what is added there


@dataclass(frozen=True, slots=True)
class _Sampled:
    at: list[int]
    rows: torch.Tensor
    seeds: list[int]
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Batch:
    slots: tuple[int, ...]
    opens: list[SlotOpen]
    penalties: PenaltyRows | None
    bias: _Bias | None
    sampled: _Sampled | None
    wait_for_end: list[tuple[int, SlotOpen]]

    def banned(self, output_lens: Sequence[int]) -> list[tuple[int, int]]:
        return [(i, t) for i, s in self.wait_for_end if output_lens[i] < s.sampling.min_new_tokens for t in end_ids(s)]


def end_ids(slot: SlotOpen) -> tuple[int, ...]:
    eos = () if slot.sampling.ignore_eos else slot.eos_ids
    return tuple(dict.fromkeys(eos + slot.sampling.stop_token_ids))


def seed_of(slot: SlotOpen) -> int:
    assert slot.sampling.seed is not None, f"slot {slot.slot}: the frontend gives every request a seed"
    return slot.sampling.seed


def top_k_of(params: SamplingParams, vocab_size: int) -> int:
    """`vocab_size` means off."""
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


def log_min_p_of(params: SamplingParams) -> float:
    return math.log(params.min_p) if params.min_p > 0 else -math.inf


# ---- Choice of a sampler, without importing a missing Triton.

NOT_SAMPLED = -1  # an output_len


class TokenSampler(Protocol):
    def open(self, slot: SlotOpen) -> None: ...

    def close(self, slot: int) -> None: ...

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        output_lens: Sequence[int],
        *,
        mask: TokenMask | None = None,
        drafts: Sequence[int | None] = (),
    ) -> tuple[Tensor, Tensor]: ...

    def guess(self, logits: Tensor, slots: Sequence[int], output_lens: Sequence[int]) -> Tensor: ...


@runtime_checkable
class CapturableSampler(TokenSampler, Protocol):
    """Sampler with capturable calls: it reads nothing on the host."""

    def sample_on_device(self, logits: Tensor, slots: Tensor, output_lens: Tensor) -> tuple[Tensor, Tensor]:
        """`sample` with int64[n] on the device; NOT_SAMPLED rows give 0."""


def make_sampler(*, num_slots: int, vocab_size: int, device: torch.device, in_graphs: bool = False) -> TokenSampler:
    """Make Triton's sampler on GPUs; all give the same tokens."""
    if in_graphs or takes_triton(device):
        from engine.sampler.triton_sampler import TritonSampler

        return TritonSampler(num_slots=num_slots, vocab_size=vocab_size, device=device)
    return Sampler(num_slots=num_slots, vocab_size=vocab_size, device=device)
