"""`allowed_token_ids` and `bad_words`, as in vLLM."""

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy

from engine.core.request import Grammar
from engine.sampling_params import SamplingParams

WORD_BITS = 32
NO_TOKEN = "allowed_token_ids and bad_words leave no token that can follow in the grammar"


class TokenRules:
    """Allows or forbids tokens of `inner`. `allowed`: empty for all tokens.

    If no token is left, the answer ends if one of `eos_ids` may follow, otherwise it is rejected;
    with `yields` the tokens of `inner` stand (forced end of reasoning).
    """

    def __init__(
        self,
        inner: Grammar | None,
        *,
        allowed: Sequence[int],
        bad_words: Sequence[tuple[int, ...]],
        vocab_size: int,
        eos_ids: Sequence[int] = (),
        yields: bool = False,
    ) -> None:
        self._inner = inner
        self._yields = yields
        self._num_bytes = 4 * -(-vocab_size // WORD_BITS)
        every = (1 << vocab_size) - 1
        banned = self._bits(word[0] for word in bad_words if len(word) == 1)
        self._always = (self._bits(allowed) if allowed else every) & ~banned
        self._ends = self._bits(eos_ids)
        self._words: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for word in bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(word)
        self._tail: deque[int] = deque(maxlen=max(map(len, bad_words), default=0))
        self._masks: tuple[int, int] | None = None  # of the current state, lazily

    @property
    def ended(self) -> bool:
        if self._inner is None:
            return self._left() == 0
        if self._yields or self._inner.ended:
            return self._inner.ended
        inner, both = self._both()
        return both == 0 and inner & self._ends != 0

    @property
    def problem(self) -> str:
        if self._inner is None:
            return ""
        return self._inner.problem or (NO_TOKEN if self._is_stuck() else "")

    def accept(self, token: int) -> bool:
        if self._is_stuck():
            return False
        self._masks = None
        self._tail.append(token)
        return self._inner is None or self._inner.accept(token)

    def bitmask(self) -> bytes:
        if self._inner is None:
            return self._left().to_bytes(self._num_bytes, "little")
        inner, both = self._both()
        return (both or inner).to_bytes(self._num_bytes, "little")

    def forced(self) -> Sequence[int]:
        """Rules may still ban them."""
        return () if self._inner is None else self._inner.forced()

    def fork(self) -> "TokenRules":
        forked = copy(self)
        forked._tail = self._tail.copy()
        forked._inner = None if self._inner is None else self._inner.fork()
        return forked

    def _is_stuck(self) -> bool:
        """No token may follow. The mask is `inner`'s, so that a token comes and is rejected."""
        return self._inner is not None and not self._yields and not self.ended and self._both()[1] == 0

    def _both(self) -> tuple[int, int]:
        assert self._inner is not None
        if self._masks is None:
            inner = int.from_bytes(self._inner.bitmask(), "little")
            self._masks = inner, inner & self._left()
        return self._masks

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


def rules_of(
    sampling: SamplingParams,
    inner: Grammar | None,
    *,
    vocab_size: int,
    eos_ids: Sequence[int] = (),
    yields: bool = False,
) -> Grammar | None:
    if not sampling.has_token_rules:
        return inner
    return TokenRules(
        inner,
        allowed=sampling.allowed_token_ids,
        bad_words=sampling.bad_token_ids,
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        yields=yields,
    )
