"""Which rows of a step count that read drafts: on the device, behind sampling and without a wait for the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.plan import PlanItem
from engine.executor.logit_rows import first_rows, runs_of
from engine.kv.upload import upload
from engine.parallel.collectives import Collectives


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """The n rows of all requests with drafts, rows of known tokens included.

    `items`: of each. `rows`: [n] int64, where it lies in the step. `parents`: [n] int64, the number of the one that samples what it guesses;
    its own, where its token is known. `right`: [n] bool, whether it counts: its token is what its parent sampled, and that counts.
    """

    items: list[PlanItem]
    rows: Tensor
    parents: Tensor
    right: Tensor

    def last(self) -> Tensor:
        """[n] bool: those that count, and none behind them does."""
        followed = torch.zeros_like(self.parents)
        is_draft = self.parents != torch.arange(len(self.parents), device=self.parents.device)
        followed.index_add_(0, self.parents, (self.right & is_draft).long())
        return self.right & (followed == 0)


def judged_rows(
    items: Sequence[PlanItem], tokens: Tensor | None, *, collectives: Collectives | None, device: torch.device
) -> JudgedRows:
    """Judge the drafts of a step. `tokens`: sampled by the items that sample, in their order; None on a rank that samples nothing."""
    starts, samples = first_rows(items), _samples(items)
    chosen = [i for run in runs_of(items) if len(run) > 1 for i in run]
    number = {i: at for at, i in enumerate(chosen)}
    parents = [number[i - items[i].behind] for i in chosen]
    guessed = [items[i].tokens[0] if items[i].draft else -1 for i in chosen]
    sampled = [samples[i - items[i].behind] for i in chosen]
    rows, above, guesses, at = upload(
        torch.tensor([[starts[i] for i in chosen], parents, guessed, sampled]), device
    ).unbind()
    own = torch.zeros(len(chosen), device=device)
    if tokens is not None:
        own = ((tokens.to(device)[at] == guesses) | (guesses < 0)).float()
    if collectives is not None:
        own = collectives.sum(own[:, None], dtype=torch.float32)[:, 0]
    right = own > 0
    return JudgedRows([items[i] for i in chosen], rows, above, _with_all_before(right, above, _deepest(parents)))


def _samples(items: Sequence[PlanItem]) -> dict[int, int]:
    """Number the items that sample."""
    return {i: at for at, i in enumerate(i for i, item in enumerate(items) if item.sample)}


def _deepest(parents: Sequence[int]) -> int:
    """Return the most drafts that a row reads, itself included."""
    depths: list[int] = []
    for i, parent in enumerate(parents):
        depths.append(0 if parent == i else depths[parent] + 1)
    return max(depths)


def _with_all_before(right: Tensor, parents: Tensor, deepest: int) -> Tensor:
    """Keep the right rows whose predecessors are all right; each round looks twice as far."""
    for _ in range(deepest.bit_length()):
        right, parents = right & right[parents], parents[parents]
    return right
