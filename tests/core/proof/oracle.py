"""What a request must get: computed from its prompt and wishes by the hash model's functions alone, without an engine.

Other weights may be taken while a request lives: from then on what it is told follows from the new ones.
"""

import array
import math
from bisect import bisect_right
from dataclasses import dataclass, field

from tests.core.hash_model import hidden_of, is_bad, logprob_of, next_token, prefix_hash, step_hash
from tests.core.named_stops import text_of
from tests.core.proof.story import Ask
from tests.grammar.fixed import cycle


@dataclass
class Answer:
    """Everything a request is told. `why`: "length" | "stop" | "abort" (NaN)."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    why: str = ""
    matched: int | str | None = None


@dataclass
class Wishes:
    """An `Ask` with its stops spelled out. `new`: tokens at most (1 on a prefill worker)."""

    ask: Ask
    new: int
    eos: frozenset[int] = frozenset()
    stop_ids: tuple[int, ...] = ()
    stop_string: str | None = None
    gives_nan: bool = False
    hands_on: bool = False  # its token goes to a decode worker, which judges it


def wishes_of(ask: Ask, *, new: int, gives_nan: bool, hands_on: bool = False) -> Wishes:
    """A stop is a token (or two) that would come at `stop_at`, so that it happens."""
    free = answer_of(Wishes(ask, ask.stop_at + 2), [0], [ask.adapter]).tokens
    wishes = Wishes(ask, new, gives_nan=gives_nan and not hands_on, hands_on=hands_on)
    if not free or not ask.stop:
        return wishes
    at = min(ask.stop_at, len(free) - 1)
    if ask.stop == "eos":
        wishes.eos = frozenset({free[at]})
    elif ask.stop == "ids":
        wishes.stop_ids = (free[at], 49)
    else:
        wishes.stop_string = text_of(free[at : at + 2])
    return wishes


def answer_of(wishes: Wishes, since: list[int], weights: list[int]) -> Answer:
    """`weights[i]`, those of its adapter added, were in use from token number `since[i]` on."""
    ask, answer = wishes.ask, Answer()
    grammar = cycle(*ask.grammar) if ask.grammar is not None else None
    if wishes.new == 0:
        used = weights[bisect_right(since, 0) - 1]
        answer.why = "abort" if wishes.gives_nan and is_bad(prefix_hash(ask.read, used)) else "length"
        return answer
    now: int | None = None
    value = 0
    while not answer.why:
        used = weights[bisect_right(since, len(answer.tokens)) - 1]
        value = prefix_hash([*ask.read, *answer.tokens], used) if used != now else step_hash(value, answer.tokens[-1])
        now = used
        token = next_token(value, grammar.bitmask() if grammar is not None else None)
        answer.tokens.append(token)
        answer.logprobs.append(logprob_of(value, token))
        bad = wishes.gives_nan and is_bad(value)
        if grammar is not None and not bad:
            assert grammar.accept(token)
        _judge(answer, wishes, ended=grammar is not None and grammar.ended, bad=bad)
    return answer


def _judge(answer: Answer, wishes: Wishes, *, ended: bool, bad: bool) -> None:
    tokens, min_new = answer.tokens, wishes.ask.min_new
    last = tokens[-1]
    stopped = wishes.stop_string is not None and len(tokens) >= min_new and text_of(tokens).endswith(wishes.stop_string)
    if bad:
        answer.why = "abort"
    elif len(tokens) >= wishes.new and (wishes.hands_on or not stopped):
        answer.why = "length"
    elif ended and len(tokens) < wishes.new:
        answer.why, answer.matched = "stop", last if last in wishes.eos else None
    elif min_new <= len(tokens) < wishes.new and (last in wishes.eos or last in wishes.stop_ids):
        answer.why, answer.matched = "stop", last
    elif stopped:
        answer.why, answer.matched = "stop", wishes.stop_string


def input_logprobs_of(ask: Ask, weights: int) -> list[tuple[int, float | None]]:
    """(token, logprob) of the prompt from `logprob_from` on; nothing predicts the first."""
    if ask.logprob_from is None or ask.logprob_from < 0:
        return []
    return [
        (ask.prompt[i], logprob_of(prefix_hash(ask.read[:i], weights), ask.prompt[i]) if i else None)
        for i in range(ask.logprob_from, ask.length)
    ]


def hidden_rows_of(tokens: list[int], weights: int) -> bytes:
    """Of every position of `tokens`."""
    rows, value = [], weights
    for token in tokens:
        value = step_hash(value, token)
        rows += hidden_of(value)
    return array.array("f", rows).tobytes()


def pooled_of(prompt: list[int], pooling: str, weights: int) -> list[float]:
    rows = [hidden_of(prefix_hash(prompt[: i + 1], weights)) for i in range(len(prompt))]
    vector = rows[-1] if pooling == "last" else [sum(column) for column in zip(*rows, strict=True)]
    norm = math.sqrt(sum(x * x for x in vector)) or 1.0
    return [x / norm for x in vector]


def turns_of(ask: Ask, num_tokens: int) -> list[tuple[int, int, int]]:
    """RoPE positions of the first tokens: an image begins behind what is before it, and what follows goes on behind its longer side."""
    turns, following = list[tuple[int, int, int]](), 0
    images = {image.start: image for image in ask.images}
    while len(turns) < num_tokens:
        if (image := images.get(len(turns))) is None:
            turns.append((following,) * 3)
            following += 1
            continue
        _, rows, columns = (side // 2 for side in image.grid)
        turns += [(following, following + row, following + column) for row in range(rows) for column in range(columns)]
        following += max(rows, columns)
    return turns[:num_tokens]
