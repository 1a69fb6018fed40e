"""What the first half of a step leaves for the second."""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Forward:
    """The hidden states [T, hidden] of a step's new tokens.

    `logits` [T, V] float32: of a recorded step. `tokens` [T] int64 and `bad` [T] bool: it is sampled, too, and the future map
    has the tokens. `gave_logits`: of a recorded step on a rank that samples nothing: the leader has its columns.
    """

    hidden: Tensor
    logits: Tensor | None = None
    tokens: Tensor | None = None
    bad: Tensor | None = None
    gave_logits: bool = False

    def rows(self, n: int, *, sampled: bool) -> "Forward":
        """Return the first `n` rows of a recorded step; its tokens only if they are `sampled`."""
        if self.logits is None or self.tokens is None or self.bad is None:
            return replace(self, hidden=self.hidden[:n])
        if not sampled:
            return Forward(self.hidden[:n], self.logits[:n])
        return Forward(self.hidden[:n], self.logits[:n], self.tokens[:n], self.bad[:n])
