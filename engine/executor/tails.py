"""The tails of pages: of each the features of its newest token, which the drafter's next entry is computed with."""

from torch import Tensor

from engine.kv.page_table import PageTable


class Tails:
    """`rows` [1 + num_pages, units, size]: in each unit the same."""

    def __init__(self, rows: Tensor, page_table: PageTable) -> None:
        self._rows = rows
        self._page_table = page_table

    def before(self, slots: Tensor, positions: Tensor) -> Tensor:
        """[n, size]: what the tails say of the tokens before `positions`; of the first one: zero."""
        pages, _ = self._page_table.locate(slots, (positions - 1).clamp_min(0))
        return self._rows[pages, 0].masked_fill((positions == 0)[:, None], 0)

    def write(self, pages: Tensor, features: Tensor) -> None:
        """Keep `features` [n, size] for `pages` [n] int64."""
        self._rows[pages] = features[:, None].to(self._rows.dtype)
