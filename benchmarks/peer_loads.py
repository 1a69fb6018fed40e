"""The workloads that engines are compared on, sent by `tandem bench`'s own client. Knows loads, not servers.

A decode-heavy: 16 at once, 64 in, 128 out. B prefill-heavy: 8 at once, 1024 in, 16 out. C interference: 4 long decodes
(64 in, 256 out) while a prompt of 1024 (16 out) comes every second. D shared prefix: 32 requests, 8 at a time, 768 of
their 800 tokens shared, 16 out. 1 and 8: as many streams, 64 in, 128 out. Prompts are token ids, or words where a server takes
no ids; each round has its own, so nothing but D's prefix is in a cache.
"""

import asyncio
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.bench.config import BenchConfig
from deploy.bench.load import run_load
from deploy.bench.run import open_session
from deploy.bench.stats import RequestRecord, summarize
from deploy.bench.target import Target
from deploy.bench.workload import make_requests

SHAPES: dict[str, dict[str, int]] = tomllib.loads(Path(__file__).with_name("peers.toml").read_text())["shapes"]
ARRIVAL_GAP_S = 1.0
SEED_STEP = 1000  # between rounds
IN_TOKENS = ("input_len", "shared_prefix_len")  # of a prompt


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What prompts of a model are drawn from: token ids of [low, high], or words of `tokens_a_word` tokens each."""

    low: int = 16
    high: int = 500
    tokens_a_word: float = 1.0


SHIPPED = Vocabulary()  # of the shipped model and of random ones


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where an engine answers. `plain`: it knows no prompts of ids, no `ignore_eos` and no `skip_special_tokens`."""

    url: str
    model: str
    plain: bool = False
    vocabulary: Vocabulary = SHIPPED


async def run_workload(name: str, server: Server, *, seed: int) -> dict[str, float]:
    """Figures of one round of a workload; raises when a request was not answered."""
    if name == "C":
        return await interference(server, seed=seed, prompts=True)
    config = _config(server, seed, SHAPES[name])
    async with open_session(config.headers()) as session:
        return figures(*await _closed(_target(server, session, config), config))


async def interference(server: Server, *, seed: int, prompts: bool) -> dict[str, float]:
    """Workload C, or only its long decodes. Rates and gaps are those of the long decodes, TTFT that of the prompts

    (without prompts: of the long ones).
    """
    config, answers = _config(server, seed, SHAPES["long"]), list[asyncio.Task[RequestRecord]]()
    async with open_session(config.headers()) as session:
        target = _target(server, session, config)
        async with asyncio.TaskGroup() as group:
            sending = (
                group.create_task(_send_prompts(target, server, seed=seed + 1, answers=answers)) if prompts else None
            )
            records, duration_s = await _closed(target, config)
            if sending is not None:
                sending.cancel()
        short = await asyncio.gather(*answers)
    found = figures(records, duration_s)
    if short:
        first = figures(short, duration_s)
        found |= {"ttft_p50_ms": first["ttft_p50_ms"], "ttft_p99_ms": first["ttft_p99_ms"], "prompts": len(short)}
    return found


async def warm_up(server: Server) -> None:
    """Prompts that no round sends."""
    config = _config(server, SEED_STEP - 1, SHAPES["warm"])
    async with open_session(config.headers()) as session:
        await _closed(_target(server, session, config), config)


def figures(records: Sequence[RequestRecord], duration_s: float) -> dict[str, float]:
    """What is compared: rates in tokens/s, times in ms. Raises when a request failed."""
    summary = summarize(records, duration_s=duration_s)
    if summary.errors or summary.ttft_s is None or summary.itl_s is None:
        raise RuntimeError(f"requests failed: {summary.errors} {[r.detail for r in records if r.error][:1]}")
    return {
        "output_tok_s": summary.output_tokens_per_s,
        "input_tok_s": summary.input_tokens_per_s,
        "ttft_p50_ms": 1000 * summary.ttft_s.p50,
        "ttft_p99_ms": 1000 * summary.ttft_s.p99,
        "itl_p50_ms": 1000 * summary.itl_s.p50,
        "itl_p99_ms": 1000 * summary.itl_s.p99,
        "itl_max_ms": 1000 * summary.itl_s.max,
        "prompt_tokens": summary.prompt_tokens,
        "output_tokens": summary.output_tokens,
    }


def _config(server: Server, seed: int, shape: dict[str, int]) -> BenchConfig:
    words, flags = server.vocabulary, dict[str, Any](shape)
    if server.plain:
        lengths = {name: round(shape[name] / words.tokens_a_word) for name in IN_TOKENS if name in shape}
        flags |= {"prompt": "words", "ignore_eos": False, **lengths}
    else:
        flags |= {"prompt": "ids", "min_token_id": words.low, "max_token_id": words.high}
    return BenchConfig(url=server.url, seed=seed, disable_progress=True, **flags)


def _target(server: Server, session: Any, config: BenchConfig) -> Target:
    return Target(server.url, session=session, config=config, model=server.model)


async def _closed(target: Target, config: BenchConfig) -> tuple[list[RequestRecord], float]:
    done = await run_load(target.send, make_requests(config), concurrency=config.concurrency)
    return done.records, done.duration_s


async def _send_prompts(
    target: Target, server: Server, *, seed: int, answers: list[asyncio.Task[RequestRecord]]
) -> None:
    """A prompt every second until this is cancelled, or there are no more (a server that slow shows it in its gaps)."""
    prompts = make_requests(_config(server, seed, SHAPES["arrivals"]))
    started_at = time.perf_counter()
    for number, prompt in enumerate(prompts, start=1):
        await asyncio.sleep(started_at + number * ARRIVAL_GAP_S - time.perf_counter())
        answers.append(asyncio.create_task(target.send(prompt, started_at=started_at)))
