"""From logits to tokens, without a wait for the device.

One step: edit the logits (penalties, logit_bias, min_new_tokens, then a grammar's mask), sample, count what was sampled. A
greedy batch without edits only takes the row maxima.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.core.plan import SlotOpen
from engine.kv.upload import upload
from engine.sampler.gumbel import sample_keys
from engine.sampler.penalties import Penalties, PenaltyRows
from engine.sampler.sampling import FilterParams, row_max, sample_any, sample_top_k, sample_top_p
from engine.sampler.token_mask import TokenMask


class Sampler:
    """A sample depends on (seed, output_len, the row's logits) alone.

    Calls come in stream order from one thread: `open` before a slot's first `sample`, `close` after its last.
    """

    def __init__(self, *, num_slots: int, vocab_size: int, device: str | torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._penalties = Penalties(num_slots=num_slots, vocab_size=vocab_size, device=self._device)
        self._slots: dict[int, SlotOpen] = {}
        self._batch: _Batch | None = None

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
        self, logits: torch.Tensor, slots: Sequence[int], output_lens: Sequence[int], *, mask: TokenMask | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample a token for each row: ([n] int64, [n] bool whether the row was bad).

        logits [n, V] float32, left as they are; `output_lens`: tokens that each slot has generated before;
        `mask`: the tokens that a grammar allows. A row with a NaN or +inf, or with nothing but -inf, is bad: token 0.
        """
        assert logits.shape == (len(slots), self._vocab_size), (logits.shape, len(slots), self._vocab_size)
        assert logits.dtype == torch.float32, logits.dtype
        batch = self._batch_of(slots)
        values, indices = row_max(logits)
        bad = ~values.isfinite()
        edited = self._edited(logits, batch, output_lens)
        if mask is not None:
            edited = mask.apply(edited, fallback=logits)
        if edited is not logits:
            values, indices = row_max(edited)
        tokens = self._sampled(edited, values[:, None], indices, batch, output_lens)
        tokens = tokens.masked_fill(bad, 0)
        if batch.penalties is not None:
            self._penalties.count(tokens, batch.penalties)
        return tokens, bad

    def _edited(self, logits: torch.Tensor, batch: "_Batch", output_lens: Sequence[int]) -> torch.Tensor:
        """`logits` itself when no row changes, else a changed copy."""
        banned = batch.banned(output_lens)
        if batch.penalties is None and batch.bias is None and not banned:
            return logits
        logits = logits.clone()
        if batch.penalties is not None:
            self._penalties.apply(logits, batch.penalties)
        if batch.bias is not None:
            logits.index_put_((batch.bias.rows, batch.bias.ids), batch.bias.values, accumulate=True)
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
        tokens = greedy
        for group in batch.groups:
            keys = sample_keys(group.seeds, [output_lens[i] for i in group.at])
            keys_t = self._upload(keys, torch.int64)[:, None]
            if group.rows is None:
                return group.sample(logits, best, keys_t)
            sampled = group.sample(logits[group.rows], best[group.rows], keys_t)
            tokens = tokens.index_copy(0, group.rows, sampled)
        return tokens

    def _batch_of(self, slots: Sequence[int]) -> "_Batch":
        """Return what depends on the slots alone; a decoding batch keeps them for many steps."""
        key = tuple(slots)
        if self._batch is None or self._batch.slots != key:
            opens = [self._slots[s] for s in key]
            self._batch = _Batch(
                slots=key,
                opens=opens,
                penalties=self._penalties.rows(opens),
                bias=self._bias(opens),
                groups=self._groups(opens),
                wait_for_end=[(i, s) for i, s in enumerate(opens) if s.sampling.min_new_tokens > 0],
            )
        return self._batch

    def _bias(self, opens: list[SlotOpen]) -> "_Bias | None":
        cells = [(i, t, b) for i, s in enumerate(opens) for t, b in s.sampling.logit_bias.items()]
        if not cells:
            return None
        rows, ids, values = zip(*cells, strict=True)
        return _Bias(
            rows=self._upload(rows, torch.int64),
            ids=self._upload(ids, torch.int64),
            values=self._upload(values, torch.float32),
        )

    def _groups(self, opens: list[SlotOpen]) -> list["_Group"]:
        """Group the sampled (not greedy) rows by filter."""
        kinds: dict[str, list[int]] = {"any": [], "top_k": [], "nucleus": []}
        for i, s in enumerate(opens):
            if not s.sampling.greedy:
                kinds[self._kind(s)].append(i)
        return [self._group(kind, at, opens) for kind, at in kinds.items() if at]

    def _kind(self, slot: SlotOpen) -> str:
        if 0 < slot.sampling.top_k < self._vocab_size:
            return "top_k"
        return "nucleus" if slot.sampling.top_p < 1.0 else "any"

    def _group(self, kind: str, at: list[int], opens: list[SlotOpen]) -> "_Group":
        params = [opens[i].sampling for i in at]
        top_k = [p.top_k if p.top_k > 0 else self._vocab_size for p in params]
        log_min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        return _Group(
            kind=kind,
            at=at,
            rows=None if len(at) == len(opens) else self._upload(at, torch.int64),
            seeds=[_seed(opens[i]) for i in at],
            most=max(top_k),
            params=FilterParams(
                temperature=self._upload([p.temperature for p in params], torch.float32)[:, None],
                top_k=self._upload(top_k, torch.int64)[:, None],
                top_p=self._upload([p.top_p for p in params], torch.float32)[:, None],
                log_min_p=self._upload(log_min_p, torch.float32)[:, None],
            ),
        )

    def _upload(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=dtype), self._device)


@dataclass(frozen=True, slots=True)
class _Bias:
    """One entry for each (row, token) with a logit_bias."""

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows `at` of a batch, sampled with one filter. `rows`: the same on the device; None: all rows."""

    kind: str
    at: list[int]
    rows: torch.Tensor | None
    seeds: list[int]
    most: int
    params: FilterParams

    def sample(self, logits: torch.Tensor, best: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        if self.kind == "any":
            return sample_any(logits, best, self.params, keys)
        if self.kind == "top_k":
            return sample_top_k(logits, best, self.params, keys, most=self.most)
        return sample_top_p(logits, best, self.params, keys)


@dataclass(frozen=True, slots=True)
class _Batch:
    slots: tuple[int, ...]
    opens: list[SlotOpen]
    penalties: PenaltyRows | None
    bias: _Bias | None
    groups: list[_Group]
    wait_for_end: list[tuple[int, SlotOpen]]

    def banned(self, output_lens: Sequence[int]) -> list[tuple[int, int]]:
        """Return the (row, token) that would end a request before its min_new_tokens."""
        return [(i, t) for i, s in self.wait_for_end if output_lens[i] < s.sampling.min_new_tokens for t in _end_ids(s)]


def _end_ids(slot: SlotOpen) -> tuple[int, ...]:
    eos = () if slot.sampling.ignore_eos else slot.eos_ids
    return tuple(dict.fromkeys(eos + slot.sampling.stop_token_ids))


def _seed(slot: SlotOpen) -> int:
    assert slot.sampling.seed is not None, f"slot {slot.slot}: the frontend gives every request a seed"
    return slot.sampling.seed


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top_num: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the model's logprobs, before any edit, temperature or filter.

    logits [n, V] float32; tokens [n] int64. Returns (chosen [n] f32, top values [n, k] f32, top ids [n, k] int64),
    best first, k = min(top_num, V).
    """
    norm = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None]) - norm
    top = logits.topk(min(top_num, logits.shape[1]), dim=-1)
    return chosen[:, 0], top.values - norm, top.indices


def requested_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the model's logprobs of `token_ids` [k] in every row: logits [n, V] -> [n, k] float32."""
    return logits[:, token_ids] - logits.logsumexp(-1, keepdim=True)
