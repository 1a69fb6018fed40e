"""Token counts for penalties, on the device, without host syncs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.core.plan import SlotOpen
from engine.kv.step_batch import upload


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
        """Start counting, with tokens from before a resumption."""
        assert slot.slot not in self._state_of, f"slot {slot.slot} is open"
        state = self._take_state()
        self._state_of[slot.slot] = state
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

    def _take_state(self) -> int:
        if not self._free:
            self._grow()
        return self._free.pop()

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
