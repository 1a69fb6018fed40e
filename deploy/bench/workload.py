"""A run's requests, from flags and a seed. Pure.

Prompts of words ("k17 v42 ...") have one token per word only with the shipped model.
"""

import gzip
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from deploy.bench.config import WorkloadFlags
from service.flags import ConfigError

# ---- traces in Mooncake's format

GZIP_MAGIC = b"\x1f\x8b"


Count = Annotated[int, msgspec.Meta(ge=0)]


class TraceEntry(msgspec.Struct, frozen=True):
    timestamp_ms: float = msgspec.field(name="timestamp")
    input_length: Count
    output_length: Count
    hash_ids: tuple[Count, ...] = ()


def read_trace(path: str) -> list[TraceEntry]:
    """Mooncake's format (FAST'25): JSON lines, perhaps gzipped. `timestamp` (ms), `input_length`,
    `output_length` (tokens), `hash_ids` (prefix-chained blocks of 512 tokens: equal ids at equal
    positions are a shared prefix).
    """
    try:
        data = Path(path).read_bytes()
        text = gzip.decompress(data) if data.startswith(GZIP_MAGIC) else data
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"--trace {path}: cannot be read: {error}") from None
    return parse_trace(text, name=path)


def parse_trace(text: bytes, *, name: str) -> list[TraceEntry]:
    entries = []
    decoder = msgspec.json.Decoder(TraceEntry)
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                entries.append(decoder.decode(line))
            except msgspec.MsgspecError as error:
                raise ConfigError(f"--trace {name}, line {number}: {error}") from None
    if not entries:
        raise ConfigError(f"--trace {name}: holds no request")
    return entries


# ---- workload

TRACE_BLOCK_TOKENS = 512  # tokens per id of a Mooncake trace
NUM_KEYS = 100


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """`at_s`: None in a closed loop. `messages`: a chat, in place of `prompt`. `prompt_len`:
    tokens, or words; 0 if unknown.
    """

    idx: int
    prompt: str | tuple[int, ...]
    prompt_len: int
    output_len: int
    at_s: float | None = None
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Random ids of [low, high], as ids or words."""

    low: int
    high: int
    as_words: bool

    def draw(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randint(self.low, self.high) for _ in range(count)]

    def prompt(self, ids: Sequence[int]) -> str | tuple[int, ...]:
        if not self.as_words:
            return tuple(ids)
        return " ".join(f"{'kv'[position % 2]}{number % NUM_KEYS:02d}" for position, number in enumerate(ids))


def make_requests(config: WorkloadFlags, trace: Sequence[TraceEntry] = ()) -> list[BenchRequest]:
    """Equal for equal flags."""
    rng = random.Random(config.seed)
    tokens = PromptTokens(config.min_token_id, config.max_token_id, as_words=config.prompt == "words")
    if config.trace:
        return _replay(config, sorted(trace, key=lambda entry: entry.timestamp_ms)[: config.num_requests], tokens, rng)
    prefixes = [tokens.draw(rng, config.shared_prefix_len) for _ in range(config.shared_prefix_groups)]
    requests = []
    for idx in range(config.num_requests):
        length = max(_length(config.input_len, config.random_range_ratio, rng), config.shared_prefix_len, 1)
        ids = prefixes[idx % len(prefixes)] + tokens.draw(rng, length - config.shared_prefix_len)
        output_len = max(_length(config.output_len, config.random_range_ratio, rng), 1)
        requests.append(BenchRequest(idx=idx, prompt=tokens.prompt(ids), prompt_len=length, output_len=output_len))
    return with_arrivals(requests, config, rng)


def with_arrivals(requests: list[BenchRequest], config: WorkloadFlags, rng: random.Random) -> list[BenchRequest]:
    """Gaps have a gamma distribution."""
    rate, shape = config.request_rate, config.burstiness
    if rate is None:
        return requests
    at_s, timed = 0.0, []
    for request in requests:
        timed.append(replace(request, at_s=at_s))
        at_s += _gap_s(rate, shape, rng)
    return timed


def _gap_s(rate: float, shape: float, rng: random.Random) -> float:
    if rate == math.inf:
        return 0.0
    return rng.expovariate(rate) if shape == 1 else rng.gammavariate(shape, 1 / (rate * shape))


def _replay(
    config: WorkloadFlags, entries: Sequence[TraceEntry], tokens: PromptTokens, rng: random.Random
) -> list[BenchRequest]:
    """In order of arrival."""
    requests = []
    for idx, entry in enumerate(entries):
        ids = block_tokens(entry, tokens, length_scale=config.length_scale, seed=config.seed)
        jitter_s = rng.random() * config.time_jitter_s
        at_s = (entry.timestamp_ms - entries[0].timestamp_ms) / 1000 * config.time_scale + jitter_s
        output_len = max(1, round(entry.output_length * config.length_scale))
        prompt = tokens.prompt(ids)
        requests.append(BenchRequest(idx=idx, prompt=prompt, prompt_len=len(ids), output_len=output_len, at_s=at_s))
    return sorted(requests, key=lambda request: (request.at_s, request.idx))


def block_tokens(entry: TraceEntry, tokens: PromptTokens, *, length_scale: float, seed: int) -> list[int]:
    """Block h is PRNG(h), so equal blocks share a prefix."""
    size = max(1, round(TRACE_BLOCK_TOKENS * length_scale))
    length = max(1, round(entry.input_length * length_scale))
    ids: list[int] = []
    for block_id in entry.hash_ids:
        ids += tokens.draw(random.Random(block_id * 1_000_003 + seed), size)
    if len(ids) < length:  # rounding, or missing blocks
        ids += tokens.draw(random.Random(f"{entry.hash_ids}{seed}"), length - len(ids))
    return ids[:length]


def _length(longest: int, ratio: float, rng: random.Random) -> int:
    return rng.randint(round(longest * ratio), longest)
