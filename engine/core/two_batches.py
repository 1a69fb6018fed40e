"""A step in two halves, so that ranks compute one while the rows of the other are under way between them: when, and where it is cut.

    items of a step   [decode][decode][ a prompt's chunk .... ]
    halves            [decode][decode][ a pro|mpt's chunk ... ]      about equal work; the second half reads KV of the first

A chunk may be cut anywhere, as into two chunks, since one long prompt is the usual prompt step; between requests alone it would stay
whole. Drafts of a request stay together. After DeepSeek's overlap of two micro-batches (github.com/deepseek-ai/profile-data) and
SGLang's --enable-two-batch-overlap, which cuts in the same two ways.
"""

from bisect import bisect_left
from collections.abc import Sequence

from msgspec.structs import replace

from engine.core.plan import PlanItem
from engine.core.split_rule import SplitRule

WHOLE = -1  # in place of a cut


class Splitter:
    """Cuts steps. `rule`: of this rank's steps alone. With DP attention (`asks_others`) all ranks decide (dp_step.agree), so each
    step has a cut to offer."""

    def __init__(self, rule: SplitRule, *, attention_tokens: float, asks_others: bool = False) -> None:
        """`attention_tokens`: as of `StepBudget`."""
        self.rule = rule
        self._attention_tokens = attention_tokens
        self._asks_others = asks_others

    def cut(self, items: Sequence[PlanItem], *, extend: bool) -> int:
        """Return the rows of the first half; WHOLE: there is one."""
        rows = sum(item.q_len for item in items)
        if any(item.images is not None or item.to_draft for item in items):
            return WHOLE
        if self._asks_others:
            return self._middle(items)
        if not self.rule.splits(rows, extend=extend):
            return WHOLE
        cut = self._middle(items)
        return cut if 0 < cut < rows else WHOLE

    def _middle(self, items: Sequence[PlanItem]) -> int:
        """Rows with half of the work, rounded up; before a request's first draft or behind its last."""
        half = sum(self._work(item.start, item.q_len) for item in items) / 2
        done, rows = 0.0, 0
        for item in items:
            work = self._work(item.start, item.q_len)
            if done >= half and not item.draft:
                break
            if item.q_len > 1 and done + work > half:
                return rows + self._tokens(item.start, item.q_len, work=half - done)
            done, rows = done + work, rows + item.q_len
        return rows

    def _work(self, start: int, tokens: int) -> float:
        """As of `StepBudget`: a unit for each token's products, and its attention to those before it."""
        return tokens * (1.0 + (start + tokens / 2) / self._attention_tokens)

    def _tokens(self, start: int, tokens: int, *, work: float) -> int:
        """How many of `tokens` behind `start` others have so much work, at least."""
        return bisect_left(range(tokens), work, key=lambda count: self._work(start, count))


def halves(items: Sequence[PlanItem], cut: int) -> tuple[list[PlanItem], list[PlanItem]]:
    """Return the items of the first `cut` rows, and the others. Of one that is cut each half has a part; they get no pages again."""
    first: list[PlanItem] = []
    second: list[PlanItem] = []
    for item in items:
        left = max(0, min(cut, item.q_len))
        cut -= left
        if left:
            first.append(item if left == item.q_len else replace(item, tokens=item.tokens[:left]))
        if left < item.q_len:
            second.append(item if not left else replace(item, tokens=item.tokens[left:], start=item.start + left))
    return first, second
