"""Tokens that a request allows or bans: `allowed_token_ids` and `bad_words`, as in vLLM. Pure.

A grammar like any other: masks follow committed tokens, so that both roles and every depth sample the same.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from engine.core.hooks import Grammar
from engine.sampling_params import SamplingParams

WORD_BITS = 32


class TokenRules:
    """`allowed`: empty: every token. `bad_words`: token sequences that the answer must not hold.

    `inner`: what the answer follows besides; its tokens are the only ones where the rules leave none of them.
    """

    def __init__(
        self,
        inner: Grammar | None,
        *,
        allowed: Sequence[int],
        bad_words: Sequence[tuple[int, ...]],
        vocab_size: int,
    ) -> None:
        self._inner = inner
        self._num_bytes = 4 * -(-vocab_size // WORD_BITS)
        every = (1 << vocab_size) - 1
        banned = self._bits(word[0] for word in bad_words if len(word) == 1)
        self._always = (self._bits(allowed) if allowed else every) & ~banned
        self._words: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for word in bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(word)
        self._tail: deque[int] = deque(maxlen=max(map(len, bad_words), default=0))

    @property
    def ended(self) -> bool:
        """Also where no token is left."""
        return self._left() == 0 if self._inner is None else self._inner.ended

    @property
    def problem(self) -> str:
        return "" if self._inner is None else self._inner.problem

    def accept(self, token: int) -> bool:
        self._tail.append(token)
        return self._inner is None or self._inner.accept(token)

    def bitmask(self) -> bytes:
        left = self._left()
        if self._inner is not None:
            inner = int.from_bytes(self._inner.bitmask(), "little")
            left = inner & left or inner
        return left.to_bytes(self._num_bytes, "little")

    def _left(self) -> int:
        tail = tuple(self._tail)
        words = self._words.get(tail[-1], ()) if tail else ()
        ends = [word[-1] for word in words if tail[1 - len(word) :] == word[:-1]]
        return self._always & ~self._bits(ends) if ends else self._always

    def _bits(self, tokens: Iterable[int]) -> int:
        bits = bytearray(self._num_bytes)
        for token in tokens:
            bits[token // 8] |= 1 << token % 8
        return int.from_bytes(bits, "little")


def rules_of(sampling: SamplingParams, inner: Grammar | None, *, vocab_size: int) -> Grammar | None:
    """`inner` under the rules of the request, if it has any."""
    if not sampling.has_token_rules:
        return inner
    return TokenRules(
        inner, allowed=sampling.allowed_token_ids, bad_words=sampling.bad_token_ids, vocab_size=vocab_size
    )
