"""What a drafter guesses in a step, pass by pass, and as the core takes it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.core.drafts import Guess


@dataclass(frozen=True, slots=True)
class Drafted:
    """The guesses of a pass for the items `of`, on the device or the host.

    `tokens` [n, paths, topk] int64 and `confidences`, float32: behind each path. `paths` [n, topk] int64: the guesses, numbered in each
    item, that the next pass goes on from; the first pass has one path, of known tokens.
    """

    of: list[int]
    tokens: Tensor
    confidences: Tensor
    paths: Tensor


def guesses_of(passes: Sequence[Drafted]) -> dict[int, list[Guess]]:
    """The guesses of each item, by passes that are on the host."""
    guesses: dict[int, list[Guess]] = {}
    parents: dict[int, list[int]] = {}  # of the paths of the next pass
    for one in passes:
        each = zip(one.of, one.tokens.tolist(), one.confidences.tolist(), one.paths.tolist(), strict=True)
        for i, tokens, confidences, paths in each:
            found, above = guesses.setdefault(i, []), parents.get(i, [-1])
            parents[i] = [len(found) + path for path in paths]
            for parent, row, trusted in zip(above, tokens, confidences, strict=True):
                found += [Guess(token, parent, value) for token, value in zip(row, trusted, strict=True)]
    return guesses
