"""A model in ten lines whose KV can be checked: each cache slot holds the hash of the token prefix that ends there.

A step verifies every slot it reads, so a lost, stale, swapped or overwritten page fails at once, and the next token is
a function of the whole prefix, so the expected answer of any prompt is computable without an engine.
"""

from engine.core.plan import ItemResult, Plan, StepResult

VOCAB = 50


def step_hash(before: int, token: int) -> int:
    return (before * 1000003 + token + 1) % (2**61 - 1)


def prefix_hash(tokens: list[int]) -> int:
    value = 0
    for token in tokens:
        value = step_hash(value, token)
    return value


def next_token(prefix: int) -> int:
    return (prefix >> 7) % VOCAB


def expected_tokens(prompt: list[int], n: int, eos: int | None = None) -> list[int]:
    """What greedy generation must give."""
    value, out = prefix_hash(prompt), []
    while len(out) < n:
        token = next_token(value)
        out.append(token)
        if token == eos:
            break
        value = step_hash(value, token)
    return out


class HashModel:
    """Executes plans in the order of the stream, like the model runner: page rows, FutureMap, KV by (page, offset)."""

    def __init__(self, *, page_size: int) -> None:
        self.page_size = page_size
        self.kv: dict[tuple[int, int], int] = {}
        self.rows: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}
        self.copies: dict[int, list[list[int | None]]] = {}  # of pages, in host memory

    def run(self, plan: Plan) -> StepResult:
        self._copy_pages(plan)
        for slot in plan.closes:
            del self.rows[slot]
        for opened in plan.opens:
            assert opened.slot not in self.rows, "a slot is opened twice"
            self.rows[opened.slot] = []
        results = []
        for item in plan.items:
            row = self.rows[item.slot]
            assert len(row) == item.page_start
            row += item.new_pages
            tokens = [t if t >= 0 else self.last[-t - 1] for t in item.tokens]
            value = self._read(item.slot, item.start)
            for position, token in enumerate(tokens, item.start):
                value = step_hash(value, token)
                self.kv[self._at(row, position)] = value
            token = next_token(value) if item.sample else None
            if token is not None:
                self.last[item.slot] = token
            results.append(ItemResult(token))
        return StepResult(plan.seq, results)

    def _copy_pages(self, plan: Plan) -> None:
        for key in plan.drops:
            del self.copies[key]
        for save in plan.saves:
            self.copies[save.key] = [[self.kv.get((p, o)) for o in range(self.page_size)] for p in save.pages]
        for load in plan.loads:
            copy = self.copies.pop(load.key)[load.start : load.start + len(load.pages)]
            for page, slots in zip(load.pages, copy, strict=True):
                self.kv.update({(page, o): v for o, v in enumerate(slots) if v is not None})

    def _at(self, row: list[int], position: int) -> tuple[int, int]:
        return row[position // self.page_size], position % self.page_size

    def _read(self, slot: int, end: int) -> int:
        """The hash at end - 1; it vouches for the slots before it only if those still hold what led to it."""
        return self.kv[self._at(self.rows[slot], end - 1)] if end else 0

    def verify(self, pages: list[int], tokens: list[int]) -> None:
        """Every slot of `pages` holds the prefix hash of `tokens`."""
        value = 0
        for position, token in enumerate(tokens):
            value = step_hash(value, token)
            assert self.kv[self._at(pages, position)] == value, f"wrong KV at position {position}"
