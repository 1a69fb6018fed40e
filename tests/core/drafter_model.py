"""A drafter in the executor, about the model of hashes: what it keeps of each token can be checked as the model's KV can.

Its entry of a token is the hash of the token behind what the page's tail, or the row before, says; so it is the model's own hash where
both are right, and a stale tail, or an entry of a rejected draft that nothing overwrites, is found when drafts are asked for.
"""

import random
from collections.abc import Callable, Sequence

from engine.core.plan import ItemResult, Plan, PlanItem
from tests.core.hash_model import KV, next_token, step_hash

At = Callable[[list[int], int], tuple[int, int]]
GUESSED = -2  # an entry behind tokens that nothing has sampled
TAIL = -1  # in place of an offset


class DrafterModel:
    """`kind`: as of `Guesses`. `kv`: the model's, `at` says where a position of a row lies."""

    def __init__(self, kind: str, *, kv: KV, at: At, page_size: int) -> None:
        self._kind = kind
        self._kv = kv
        self._at = at
        self._page_size = page_size
        self._random = random.Random(7)
        self.pages: dict[int, dict[int, int]] = {}  # page -> offset -> entry; and the tail
        self._host: dict[int, dict[int, int]] = {}
        self._saved: dict[int, list[dict[int, int]]] = {}

    def copy_pages(self, plan: Plan) -> None:
        """In the order of the model's."""
        for out in plan.to_host:
            self._host[out.host_page] = dict(self.pages.get(out.page, {}))
        for back in plan.from_host:
            self.pages[back.page] = dict(self._host[back.host_page])
        for key in plan.drops:
            del self._saved[key]
        for load in plan.loads:
            saved = self._saved.pop(load.key)[load.start : load.start + len(load.pages)]
            self.pages.update({page: dict(found) for page, found in zip(load.pages, saved, strict=True)})
        for save in plan.saves:
            self._saved[save.key] = [dict(self.pages.get(page, {})) for page in save.pages]

    def follow(self, runs: Sequence[tuple[list[int], int, list[PlanItem], list[ItemResult]]]) -> None:
        """Keep what a step computed: (row of pages, seed, items of a request, their results) of each request."""
        for row, seed, items, results in runs:
            before, accepted = self._tail_before(row, items[0].start, seed), True
            for number, item in enumerate(items):
                if item.draft:
                    accepted = accepted and results[number - 1].token == item.tokens[0]
                for position in range(item.start, item.kv_len):
                    at = self._at(row, position)
                    self._page(at[0])[at[1]] = step_hash(before, self._kv[at].token)
                    before = self._kv[at].value
                    if accepted:
                        self.keep_tail(at[0], before)

    def keep_tail(self, page: int, value: int) -> None:
        self._page(page)[TAIL] = value

    def write(self, pages: Sequence[int], length: int) -> None:
        """As a transfer does: what belongs to the KV of `length` tokens."""
        for position in range(length):
            page, offset = self._at(list(pages), position)
            self._page(page)[offset] = self._page(page)[TAIL] = self._kv[page, offset].value

    def draft(self, item: PlanItem, row: list[int], seed: int) -> list[int]:
        for position in range(item.start):
            page, offset = at = self._at(row, position)
            found = self.pages.get(page, {}).get(offset)
            assert found == self._kv[at].value, (
                f"the drafter's entry of position {position} of {item.start} is not its own"
            )
        value = self._tail_before(row, item.start, seed)
        assert item.start == 0 or value == self._kv[self._at(row, item.start - 1)].value, "the tail of other tokens"
        tokens = []
        for position in range(item.start, item.start + item.to_draft):
            value = step_hash(value, tokens[-1] if tokens else item.tokens[0])
            page, offset = self._at(row, position)
            self._page(page)[offset] = value if position == item.start else GUESSED
            right = next_token(value)
            is_wrong = self._kind == "wrong" or (self._kind == "mixed" and self._random.random() < 0.3)
            tokens.append((right + 1) % 50 if is_wrong else right)
        return tokens

    def _tail_before(self, row: list[int], start: int, seed: int) -> int:
        return self.pages.get(self._at(row, start - 1)[0], {}).get(TAIL, GUESSED) if start else seed

    def _page(self, page: int) -> dict[int, int]:
        return self.pages.setdefault(page, {})
