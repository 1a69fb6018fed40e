"""Replicas do not give their requests the same seeds, unless they are told to."""

import random

from engine.config import EngineConfig
from engine.local_defaults import with_random_seed


def seeds_of_requests(config: EngineConfig) -> list[int]:
    """Of requests that bring none, as engine/frontend/services.py draws them."""
    prng = random.Random(config.random_seed)
    return [prng.getrandbits(62) for _ in range(5)]


def test_two_workers_without_a_flag_draw_apart() -> None:
    one, two = (with_random_seed(EngineConfig()) for _ in range(2))
    assert one.random_seed is not None and seeds_of_requests(one) != seeds_of_requests(two)


def test_the_seed_comes_from_outside_once() -> None:
    drawn = with_random_seed(EngineConfig(), bits=lambda k: k + 1)
    assert drawn.random_seed == 32 and with_random_seed(drawn) is drawn


def test_an_explicit_seed_stays() -> None:
    for seed in (0, 7):
        one, two = (with_random_seed(EngineConfig(random_seed=seed)) for _ in range(2))
        assert one.random_seed == seed and seeds_of_requests(one) == seeds_of_requests(two)
