"""The seed of a worker, from which the seeds of requests that bring none follow.

Drawn once at start where no flag gives one: with one number for all, the replicas of a worker would give the same request
the same "random" answer, and again after each restart. A prefill and a decode worker have seeds of their own: prefill samples the first
token of a request, decode the others, and a sample depends on (seed, position, logits) alone.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace

from engine.config import EngineConfig

SEED_BITS = 31


def with_random_seed(config: EngineConfig, bits: Callable[[int], int] = secrets.randbits) -> EngineConfig:
    """Return `config` with a seed, from the operating system where none is given. `bits(k)`: k random bits."""
    return config if config.random_seed is not None else replace(config, random_seed=bits(SEED_BITS))
