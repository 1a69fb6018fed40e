"""Requests of every kind for the shipped model, drawn from one seed, and the answers that can be known."""

import random
from typing import Any

from tools.recall.oracle import continuation

NUM_SPECIALS, NUM_KEYS = 16, 256
BOS = 1


def pairs(rng: random.Random, n: int) -> list[int]:
    """BOS and n key-value pairs, each key and each value once."""
    ids = [BOS]
    for key, value in zip(rng.sample(range(NUM_KEYS), n), rng.sample(range(NUM_KEYS), n), strict=True):
        ids += [NUM_SPECIALS + key, NUM_SPECIALS + NUM_KEYS + value]
    return ids


def recall_prompt(rng: random.Random, n: int) -> list[int]:
    """Pairs, then one of the keys again: the answer is its value and what followed."""
    ids = pairs(rng, n)
    return [*ids, ids[1 + 2 * rng.randrange(n)]]


def recall_body(rng: random.Random, n: int, *, max_new_tokens: int = 1) -> tuple[dict[str, Any], list[int]]:
    ids = recall_prompt(rng, n)
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens}}
    return body, continuation(ids, max_new_tokens)


def mixed_bodies(seed: int, count: int = 64) -> list[dict[str, Any]]:
    """For a tiny random checkpoint: short and long, shared prefixes, streaming, greedy and seeded draws with filters.

    (Not for the shipped model: its logits are built from few values and tie exactly, so a filter's border is noise.)
    """
    rng = random.Random(seed)
    shared = _random_ids(rng, 300)
    return [_mixed_body(rng, shared, i) for i in range(count)]


def _random_ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(NUM_SPECIALS, NUM_SPECIALS + 256) for _ in range(n)]


def _mixed_body(rng: random.Random, shared: list[int], i: int) -> dict[str, Any]:
    kind = i % 4
    if kind == 0:
        ids = _random_ids(rng, rng.randint(1, 30))
    elif kind == 1:
        ids = _random_ids(rng, rng.randint(300, 900))
    elif kind == 2:
        ids = [*shared, *_random_ids(rng, 3)]
    else:
        ids = [*shared[: rng.randint(10, 290)], *_random_ids(rng, 20)]
    sampling: dict[str, Any] = {"max_new_tokens": rng.randint(1, 24), "ignore_eos": True}
    if i % 3:
        sampling |= {"temperature": 0.8, "seed": rng.randrange(2**31)}
        sampling |= rng.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}, {"frequency_penalty": 0.5}])
    else:
        sampling |= {"temperature": 0}
    return {"input_ids": ids, "sampling_params": sampling, "stream": bool(i % 2)}
