"""One step's requests as attention and its kernels see them: lengths, page tables, where new tokens go."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(slots=True)
class WindowRows:
    """As of StepBatch, in the pool of layers with a window. A row has pages before the window that are not the request's any more."""

    page_table: torch.Tensor
    token_pages: torch.Tensor


@dataclass(slots=True)
class TreePaths:
    """The places at which rows of a tree of drafts find the newest tokens that they see: nodes beside a row's path lie among them.

    starts: [B] int32: tokens of positions before it lie in their own places; of a row without a tree: its kv_len
    places: [B, D] int32: the token of position starts[b] + j lies where the request's pages have position places[b, j]; 0 where unused

    A row's own token is the last one of its path. So a row sees the tokens of its path in the order of their positions.
    """

    starts: torch.Tensor
    places: torch.Tensor

    def of(self, rows: torch.Tensor) -> "TreePaths":
        """Return those of `rows` [n] int64."""
        return TreePaths(self.starts[rows], self.places[rows])

    def end(self) -> int:
        """Return how many positions the places reach over; waits for the device."""
        return int(self.places.max()) + 1


@dataclass(slots=True)
class StepBatch:
    """One step of B requests with T new tokens, request after request. Tensors are on the pool's device.

    extend:      any q_len; False: every q_len is 1 (decode) and T == B
    q_lens:      [B] new tokens of each request, at least 1
    kv_lens:     [B] tokens of each request in the cache after this step
    page_table:  [slots, max_pages] int32, of all requests; row s: page ids of the request in slot s in order, then padding
    slots:       [B] int64
    token_pages: [T] int64, token_offsets: [T] int64: where each new token's KV goes
    riders:      requests of an extend step that decode; None: any request of one token may
    state_slots: [B] int32, where each request's recurrent state lies (engine/kv/state_pool.py); None: the model has none
    windows:     where layers with a window have their KV; None: where the others have it
    drafted:     entries of single tokens that read a draft: each is of the request of the entry before it, and sees one token more;
                 in a tree of drafts: no fewer
    paths:       of entries that read nodes of a tree of drafts; None: every token lies in its own position's place
    """

    extend: bool
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    page_table: torch.Tensor
    slots: torch.Tensor
    token_pages: torch.Tensor
    token_offsets: torch.Tensor
    riders: Sequence[int] | None = None
    state_slots: torch.Tensor | None = None
    windows: WindowRows | None = None
    drafted: frozenset[int] = frozenset()
    paths: TreePaths | None = None

    @property
    def drafts(self) -> bool:
        """Whether some requests of single tokens stand in several entries."""
        return bool(self.drafted)

    def first_rows(self) -> list[int]:
        """Return the first entry of each request, and the end; where tokens are single ones, these are its rows."""
        return [i for i in range(len(self.q_lens) + 1) if i not in self.drafted]

    def spans(self) -> list[tuple[int, int]]:
        """Return the (first, end) row of each request in the [T, ...] tensors."""
        ends = list(accumulate(self.q_lens))
        return [(end - n, end) for end, n in zip(ends, self.q_lens, strict=True)]

    def page_rows(self, page_size: int) -> torch.Tensor:
        """Return [B, pages of the longest request] int32, a copy: row i: of request i."""
        end = max(self.kv_lens) if self.paths is None else max(*self.kv_lens, self.paths.end())
        return self.page_table[self.slots, : -(-end // page_size)]


@dataclass(slots=True)
class DeviceStep:
    """A decode step of B requests whose lengths only the device knows, as captured graphs need it. kv_lens: [B] int32.

    paths: as of StepBatch.
    """

    page_table: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    token_pages: torch.Tensor
    token_offsets: torch.Tensor
    paths: TreePaths | None = None


@dataclass(slots=True)
class DeviceExtend:
    """As DeviceStep, for any q_len. starts: [B + 1] int32, the first row of each request; a request may have no tokens.

    There may be more token_pages than the requests have tokens: the rest is padding.
    """

    page_table: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    kv_lens: torch.Tensor
    token_pages: torch.Tensor
    token_offsets: torch.Tensor
