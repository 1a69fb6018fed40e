"""Tokens and drafts that steps leave on the device for steps planned without them.

    verify step    newest token, drafts that count    read by the drafter's step behind it
    drafter step   drafts                             read by the verify step behind it

After SGLang's FutureMap of its overlap scheduler for speculation. Each rank has its own, with equal
content; one place a slot is enough, since steps alternate.
"""

import torch
from torch import Tensor

from engine.executor.step_part import StepInputs
from engine.speculative.draft_rows import JudgedRows, VerifiedRows
from engine.speculative.drafts import SLOTS

NO_DRAFT = -1  # unlike any sample


class DraftFutures:
    """Places by slot for the newest token and `most` drafts: `placeholder` of drafts.py.

    No call waits for the device, or reads on the host.
    """

    def __init__(self, *, num_slots: int, most: int, device: torch.device) -> None:
        self._scratch, self._columns = num_slots, num_slots + 1
        self._tokens = torch.full((1 + most, self._columns), NO_DRAFT, dtype=torch.int64, device=device)
        self._ends = torch.zeros(self._columns, dtype=torch.int64, device=device)

    def read(self, ids: Tensor, *, least: int = NO_DRAFT) -> Tensor:
        """Replace placeholders in `ids` [n] int64, by `least` for a draft that was not made."""
        row = (-1 - ids) // SLOTS - 1  # -1: of the future map; less: a token
        at = torch.where(row < 0, 0, (-1 - ids) % SLOTS + row * self._columns)
        return torch.where(row < 0, ids, self._tokens.view(-1)[at].clamp_min(least))

    def keep_verified(self, rows: VerifiedRows, found: JudgedRows) -> None:
        """Keep token and end of the last row that counts."""
        at = torch.where(found.last, rows.slots, self._scratch)
        self._tokens[0, at] = found.tokens
        self._ends[at] = rows.positions + 1

    def accepted(self, slots: Tensor, starts: Tensor, most: Tensor) -> Tensor:
        """Drafts [n] that count behind position `starts` - 1, of `most` in flight; all int64."""
        return torch.minimum((self._ends[slots] - starts).clamp_min(0), most)

    def forget_drafts(self, slots: Tensor) -> None:
        """Mark all drafts of `slots` [n] as not made, before a step that may fail."""
        self._tokens[1:].index_fill_(1, slots, NO_DRAFT)

    def keep_drafts(self, number: int, slots: Tensor, tokens: Tensor) -> None:
        """Keep draft `number`, from 1 on: one of `tokens` [n] for each of `slots` [n]."""
        self._tokens[number, slots] = tokens


class DraftedInputs:
    """StepInputs whose ids may be placeholders of `futures` or `inner`; a missing draft is 0."""

    def __init__(self, inner: StepInputs, futures: DraftFutures) -> None:
        self._inner = inner
        self.futures = futures

    def resolve(self, token_ids: Tensor) -> Tensor:
        return self._inner.resolve(self.futures.read(token_ids, least=0))

    def fill(self, rows: int) -> None:
        self._inner.fill(rows)

    def recorded(self, token_ids: Tensor) -> Tensor:
        return self._inner.recorded(self.futures.read(token_ids, least=0))
