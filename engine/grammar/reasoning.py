"""A grammar after reasoning, with a budget that forces the reasoning's end.

UNDECIDED --start--> OPEN --end, or forced end--> CLOSED: only the grammar
  \\----------any other token----------------/

Like any grammar it follows committed tokens, so that both roles and every depth sample the same.
"""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from engine.core.request import Grammar
from engine.sampling_params import ReasoningGate
from engine.text.reasoning import Opening, ReasoningTokens

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer  # needs an extra

WORD_BITS = 32


class ReasoningGrammar:
    """Reasoning, then the answer by `inner`, if constrained. `start_id`: may start reasoning.

    `forced`: tokens that end the reasoning after `budget` tokens.
    """

    def __init__(
        self,
        inner: Grammar | None,
        *,
        tokens: ReasoningTokens,
        start_id: int,
        forced: Sequence[int],
        budget: int | None,
        vocab_size: int,
    ) -> None:
        self._inner = inner
        self._tokens = tokens
        self._start_id = start_id
        self._forced = forced
        self._budget = budget
        self._num_bytes = 4 * -(-vocab_size // WORD_BITS)
        self._num_inside = 0
        self._num_forced = 0

    @property
    def ended(self) -> bool:
        return self._tokens.opening is Opening.CLOSED and self._inner is not None and self._inner.ended

    @property
    def problem(self) -> str:
        return "" if self._inner is None else self._inner.problem

    def accept(self, token: int) -> bool:
        if self._tokens.opening is Opening.UNDECIDED and self._inner is not None:
            self._tokens.opening = Opening.OPEN if token == self._start_id else Opening.CLOSED
            return token == self._start_id or self._inner.accept(token)
        if self._tokens.opening is Opening.CLOSED:
            return self._inner is None or self._inner.accept(token)
        self._follow(token)
        return True

    def bitmask(self) -> bytes:
        opening = self._tokens.opening
        if opening is Opening.OPEN and self._is_spent():
            return (1 << self._forced[self._num_forced]).to_bytes(self._num_bytes, "little")
        if opening is Opening.OPEN or self._inner is None:
            return b"\xff" * self._num_bytes
        mask = self._inner.bitmask()
        if opening is Opening.CLOSED:
            return mask
        return (int.from_bytes(mask, "little") | 1 << self._start_id).to_bytes(self._num_bytes, "little")

    def forced(self) -> Sequence[int]:
        if self._tokens.opening is Opening.OPEN:
            return self._forced[self._num_forced :] if self._is_spent() else ()
        return self._inner.forced() if self._tokens.opening is Opening.CLOSED and self._inner is not None else ()

    def fork(self) -> "ReasoningGrammar":
        forked = copy(self)
        forked._tokens = copy(self._tokens)
        forked._inner = None if self._inner is None else self._inner.fork()
        return forked

    def _follow(self, token: int) -> None:
        if self._tokens.opening is Opening.OPEN:
            self._num_forced += self._is_spent()
            self._num_inside += 1
        self._tokens.add([token])
        if self._num_forced == len(self._forced):
            self._tokens.opening = Opening.CLOSED

    def _is_spent(self) -> bool:
        return self._budget is not None and self._num_inside >= self._budget


class ReasoningGates:
    """Reasoning grammars of one model. `vocab_size`: of the logits."""

    def __init__(self, tokenizer: "Tokenizer", *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def behind(self, gate: ReasoningGate, inner: Grammar | None) -> Grammar:
        """`inner` after the reasoning; at once if the first token cannot decide."""
        start = self._tokenizer.encode(gate.start, add_special_tokens=False)
        opening = Opening(gate.opening)
        if opening is Opening.UNDECIDED and len(start) != 1 and inner is not None:
            return inner
        return ReasoningGrammar(
            inner,
            tokens=ReasoningTokens(
                start=gate.start, ends=(gate.end,), opening=opening, token_bytes=self._tokenizer.token_bytes
            ),
            start_id=start[0],
            forced=self._tokenizer.encode(gate.forced, add_special_tokens=False),
            budget=gate.budget,
            vocab_size=self._vocab_size,
        )
