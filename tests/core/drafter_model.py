"""A drafter in the executor, about the model of hashes: what it keeps of each token can be checked as the model's KV can.

Its entry of a token is the hash of the token behind what the page's tail, or the row before, says; so it is the model's own hash where
both are right, and a stale tail, or an entry of a rejected draft that nothing overwrites, is found when drafts are asked for.
"""

import random
from collections.abc import Callable, Sequence

from engine.core.plan import Guess, ItemResult, Plan, PlanItem
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
            values, accepted = list[int](), list[bool]()
            for number, item in enumerate(items):
                above = number - item.behind
                before = values[above] if item.draft else self._tail_before(row, item.start, seed)
                right = not item.draft or (accepted[above] and results[above].token == item.tokens[0])
                for position in range(item.start, item.kv_len):
                    at = self._at(row, position if item.place < 0 else item.place)
                    self._page(at[0])[at[1]] = step_hash(before, self._kv[at].token)
                    before = self._kv[at].value
                    if right:
                        self.keep_tail(self._at(row, position)[0], before)
                values.append(before)
                accepted.append(right)

    def move(self, row: list[int], moves: Sequence[tuple[int, int]]) -> None:
        """Move entries of a row: (place, position)."""
        found = [self.pages[page][offset] for place, _ in moves for page, offset in [self._at(row, place)]]
        for entry, (_, position) in zip(found, moves, strict=True):
            page, offset = self._at(row, position)
            self._page(page)[offset] = entry

    def keep_tail(self, page: int, value: int) -> None:
        self._page(page)[TAIL] = value

    def write(self, pages: Sequence[int], length: int) -> None:
        """As a transfer does: what belongs to the KV of `length` tokens."""
        for position in range(length):
            page, offset = self._at(list(pages), position)
            self._page(page)[offset] = self._page(page)[TAIL] = self._kv[page, offset].value

    def draft(self, item: PlanItem, row: list[int], seed: int) -> list[Guess]:
        for position in range(item.start):
            page, offset = at = self._at(row, position)
            found = self.pages.get(page, {}).get(offset)
            assert found == self._kv[at].value, (
                f"the drafter's entry of position {position} of {item.start} is not its own"
            )
        value = self._tail_before(row, item.start, seed)
        assert item.start == 0 or value == self._kv[self._at(row, item.start - 1)].value, "the tail of other tokens"
        first, offset = self._at(row, item.start)
        self._page(first)[offset] = step_hash(value, item.tokens[0])
        found, beams = list[Guess](), [(-1, step_hash(value, item.tokens[0]))]
        for number in range(item.to_draft):
            layer = [(above, before, token) for above, before in beams for token in self._guesses(before, item.topk)]
            begin = len(found)
            found += [Guess(token, above, self._confidence(item.topk)) for above, _, token in layer]
            chosen = sorted(self._random.sample(range(len(layer)), min(item.topk, len(layer))))
            beams = [(begin + i, step_hash(layer[i][1], layer[i][2])) for i in chosen]
            if number + 1 < item.to_draft:
                for place in range(len(beams)):
                    page, offset = self._at(row, item.start + 1 + number * item.topk + place)
                    self._page(page)[offset] = GUESSED
        return found

    def _confidence(self, topk: int) -> float:
        """High enough that steps verify some of a tree, and all of a chain."""
        return 1.0 if topk == 1 else self._random.uniform(0.3, 1.0)

    def _guesses(self, before: int, topk: int) -> list[int]:
        """`topk` tokens for one place, one of them right unless the drafter is wrong."""
        right = next_token(before)
        is_wrong = self._kind == "wrong" or (self._kind == "mixed" and self._random.random() < 0.3)
        others = [(right + 1 + n) % 50 for n in range(topk - (not is_wrong))]
        if not is_wrong:
            others.insert(self._random.randint(0, len(others)), right)
        return others

    def _tail_before(self, row: list[int], start: int, seed: int) -> int:
        return self.pages.get(self._at(row, start - 1)[0], {}).get(TAIL, GUESSED) if start else seed

    def _page(self, page: int) -> dict[int, int]:
        return self.pages.setdefault(page, {})
