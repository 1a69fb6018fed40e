"""The answer the shipped model must give, computed without a model. Pure: no torch, no tokenizer.

The model finds the earlier place of its last token and repeats what followed there: greedily, it replays the prompt. A
lost, swapped or reused page changes the answer, since K and V of layer 1 hold the facts. (Layer 0 reads one token back
only, so faults in its older tokens do not show; use random weights for those.) The token after `ids` is:

    last token   next
    unseen       <eos>
    <unk>        unseen                (words outside the vocabulary never match)
    <eos>        ids[1]                (the start of the prompt again, with ignore_eos)
    other        what followed it before; `unseen` where it is new
"""

from collections.abc import Sequence
from itertools import pairwise

from tools.recall import vocab

NEVER_SAMPLED = frozenset({vocab.PAD, vocab.BOS})


class OutsideDomain(ValueError):
    """The prompt has no single right answer; the message says why."""


def continuation(prompt_ids: Sequence[int], n: int, *, ignore_eos: bool = False) -> list[int]:
    """The `n` tokens of greedy decoding after `prompt_ids`; they end with the first <eos> unless `ignore_eos`.

    Exact for any batch, bf16 and fp32. Raises `OutsideDomain` unless the prompt starts with <bos>, holds no other <bos> or
    <pad>, and one token alone follows each token that the answer looks up.
    """
    _check_prompt(prompt_ids)
    followers = _followers(prompt_ids)
    ids = list(prompt_ids)
    for _ in range(n):
        token = _next(ids, followers)
        followers.setdefault(ids[-1], set()).add(token)
        ids.append(token)
        if token == vocab.EOS and not ignore_eos:
            break
    return ids[len(prompt_ids) :]


def _check_prompt(ids: Sequence[int]) -> None:
    if not ids or ids[0] != vocab.BOS:
        raise OutsideDomain("the prompt does not start with <bos>: its first token would match itself")
    for position, token in enumerate(ids):
        if not 0 <= token < vocab.VOCAB_SIZE:
            raise OutsideDomain(f"{token} at position {position} is not a token id")
        if position and token in NEVER_SAMPLED:
            raise OutsideDomain(f"{vocab.WORDS[token]} at position {position}")


def _followers(ids: Sequence[int]) -> dict[int, set[int]]:
    followers: dict[int, set[int]] = {}
    for token, after in pairwise(ids):
        followers.setdefault(token, set()).add(after)
    return followers


def _next(ids: list[int], followers: dict[int, set[int]]) -> int:
    last = ids[-1]
    if last == vocab.UNSEEN:
        return vocab.EOS
    if last in (vocab.UNK, vocab.BOS):
        return vocab.UNSEEN
    if last == vocab.EOS:
        return ids[1]
    choices = followers.get(last, set())
    if len(choices) > 1:
        words = ", ".join(vocab.WORDS[token] for token in sorted(choices))
        raise OutsideDomain(f"{vocab.WORDS[last]} was followed by several tokens: {words}")
    return min(choices) if choices else vocab.UNSEEN
