"""What to send and when: pure, from flags and a seed to a list of requests.

A prompt of token ids has an exact length on every server. A prompt of words ("k17 v42 ...") has one token a word for
the shipped model only; other tokenizers make several.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploy.bench.config import BenchConfig
from deploy.bench.trace import TraceEntry

TRACE_BLOCK_TOKENS = 512  # tokens behind one id of a Mooncake trace
NUM_KEYS = 100


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """One request. `at_s`: seconds after the start to send it at; None: as soon as a place is free (closed loop)."""

    idx: int
    prompt: str | tuple[int, ...]
    prompt_len: int
    output_len: int
    at_s: float | None = None


def make_requests(config: BenchConfig, trace: Sequence[TraceEntry] = ()) -> list[BenchRequest]:
    """The requests of a run; the same flags give the same list."""
    rng = random.Random(config.seed)
    requests = replay(config, trace, rng) if config.trace else synthetic(config, rng)
    return poisson(requests, config.request_rate, rng) if config.request_rate else requests


def synthetic(config: BenchConfig, rng: random.Random) -> list[BenchRequest]:
    """Random prompts; request i of group g starts with the group's prefix."""
    prefixes = [_draw(config, rng, config.shared_prefix_len) for _ in range(config.shared_prefix_groups)]
    requests = []
    for idx in range(config.num_requests):
        length = max(_length(config.input_len, config, rng), config.shared_prefix_len, 1)
        own = _draw(config, rng, length - config.shared_prefix_len)
        ids = prefixes[idx % len(prefixes)] + own
        output_len = max(_length(config.output_len, config, rng), 1)
        requests.append(BenchRequest(idx=idx, prompt=_prompt(config, ids), prompt_len=length, output_len=output_len))
    return requests


def poisson(requests: Sequence[BenchRequest], rate: float, rng: random.Random) -> list[BenchRequest]:
    """The same requests with exponential gaps of mean 1/rate seconds; the first is sent at once."""
    at_s, timed = 0.0, []
    for request in requests:
        timed.append(replace(request, at_s=at_s))
        at_s += rng.expovariate(rate)
    return timed


def replay(config: BenchConfig, trace: Sequence[TraceEntry], rng: random.Random) -> list[BenchRequest]:
    """A trace's requests, scaled, in order of arrival; the first is sent at once."""
    entries = sorted(trace, key=lambda entry: entry.timestamp_ms)[: config.num_requests]
    start_ms = entries[0].timestamp_ms if entries else 0.0
    requests = []
    for idx, entry in enumerate(entries):
        ids = block_tokens(config, entry)
        jitter_s = rng.random() * config.time_jitter_s
        at_s = (entry.timestamp_ms - start_ms) / 1000 * config.time_scale + jitter_s
        output_len = max(1, round(entry.output_length * config.length_scale))
        prompt = _prompt(config, ids)
        requests.append(BenchRequest(idx=idx, prompt=prompt, prompt_len=len(ids), output_len=output_len, at_s=at_s))
    return sorted(requests, key=lambda request: (request.at_s, request.idx))


def block_tokens(config: BenchConfig, entry: TraceEntry) -> list[int]:
    """Token ids of a traced prompt: block h is PRNG(h), so equal blocks share a prefix; the last is cut to length."""
    size = max(1, round(TRACE_BLOCK_TOKENS * config.length_scale))
    length = max(1, round(entry.input_length * config.length_scale))
    ids: list[int] = []
    for block_id in entry.hash_ids:
        ids += _draw(config, random.Random(block_id * 1_000_003 + config.seed), size)
    if len(ids) < length:  # rounding, or a trace that lists too few blocks
        ids += _draw(config, random.Random(f"{entry.hash_ids}{config.seed}"), length - len(ids))
    return ids[:length]


def _length(longest: int, config: BenchConfig, rng: random.Random) -> int:
    return rng.randint(round(longest * config.random_range_ratio), longest)


def _draw(config: BenchConfig, rng: random.Random, count: int) -> list[int]:
    return [rng.randint(config.min_token_id, config.max_token_id) for _ in range(count)]


def _prompt(config: BenchConfig, ids: Sequence[int]) -> str | tuple[int, ...]:
    if config.prompt == "ids":
        return tuple(ids)
    return " ".join(f"{'kv'[position % 2]}{number % NUM_KEYS:02d}" for position, number in enumerate(ids))
