"""One run of the bench, from config to result."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import aiohttp
import msgspec
from tqdm import tqdm  # type: ignore[import-untyped]

from deploy.bench.conditions import ServerFacts, describe_client, describe_load, find_server
from deploy.bench.config import BenchConfig
from deploy.bench.datasets import read_requests
from deploy.bench.environment import describe
from deploy.bench.load import Measured, OnDone, run_in_turns, run_load
from deploy.bench.stats import (
    RequestRecord,
    goodput_line,
    latency_table,
    ratio_table,
    ratios,
    summary_lines,
    token_line,
)
from deploy.bench.target import PATHS, Target
from deploy.bench.tokens import TokenCounter, token_counter
from deploy.bench.workload import BenchRequest, make_requests, read_trace, with_arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The requests of a run, the servers in order of --url and --compare, and the machine."""

    requests: list[BenchRequest]
    tokens: TokenCounter
    servers: list[ServerFacts]
    environment: dict[str, Any]


async def measure(config: BenchConfig) -> list[Measured]:
    """Raises ConfigError."""
    return await run(config, await prepare(config))


async def prepare(config: BenchConfig) -> Prepared:
    """Raises ConfigError."""
    tokens = token_counter(config)
    requests = requests_of(config, tokens)
    async with open_session(config.headers()) as session:
        servers = [await find_server(session, url, config) for url in config.urls]
    return Prepared(requests=requests, tokens=tokens, servers=servers, environment=describe())


def requests_of(config: BenchConfig, tokens: TokenCounter) -> list[BenchRequest]:
    """Raises ConfigError."""
    if config.dataset_path is not None:
        return with_arrivals(read_requests(config, tokens), config, random.Random(config.seed))
    return make_requests(config, read_trace(config.trace) if config.trace else ())


async def run(config: BenchConfig, prepared: Prepared) -> list[Measured]:
    """Warm up, then load one target, or two in turns."""
    requests = prepared.requests
    async with open_session(config.headers()) as session:
        targets = [
            Target(server.url, session=session, config=config, model=server.model, tokens=prepared.tokens)
            for server in prepared.servers
        ]
        for target in targets:
            await run_load(target.send, [_reversed(one) for one in requests[: config.warmup]], concurrency=1)
        with tqdm(total=len(requests) * len(targets), unit="req", disable=config.disable_progress or None) as bar:
            return await run_in_turns(
                [target.send for target in targets],
                requests,
                rounds=config.rounds if len(targets) > 1 else 1,
                concurrency=config.concurrency,
                on_done=_noting(bar),
            )


def open_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, connect=30),
        headers=headers,
        trust_env=False,
        read_bufsize=1 << 20,
    )


def conditions_text(config: BenchConfig, prepared: Prepared) -> str:
    servers = [
        (name, f"{one.url}{f' (version {one.version})' if one.version else ''}, {PATHS[config.api]}")
        for name, one in zip(("server", "second"), prepared.servers, strict=False)
    ]
    models = " and ".join(dict.fromkeys(one.model for one in prepared.servers))
    load = describe_load(config, prepared.requests)
    rows = [*servers, ("model", models), *load, *describe_client(prepared.environment)]
    return "\n".join(f"{name:<13}{value}" for name, value in rows)


def print_report(config: BenchConfig, measured: Sequence[Measured]) -> None:
    limits, is_limited = config.goodput_limits(), config.concurrency is not None
    for url, one in zip(config.urls, measured, strict=True):
        lines = [*summary_lines(one.summary, is_limited=is_limited), token_line(one.records)]
        if limits:
            lines.append(goodput_line(one.records, limits, duration_s=one.duration_s))
        table = latency_table(one.records, metrics=config.metrics(), percents=config.percents())
        print("\n".join(["", url, "", *lines, "", table, *_error_examples(one.records)]))
    if len(measured) == 2:
        first, second = config.urls
        found = ratios(*(one.summary for one in measured))
        print("\n" + ratio_table(found, first=first, second=second))


def result_json(config: BenchConfig, prepared: Prepared, measured: Sequence[Measured]) -> bytes:
    """Without API key and headers."""
    targets = [
        {
            "url": server.url,
            "model": server.model,
            "version": server.version,
            "summary": one.summary,
            "records": one.records,
        }
        for server, one in zip(prepared.servers, measured, strict=True)
    ]
    is_secret = config.api_key or config.header
    result = {
        "environment": prepared.environment | ({"command": "tandem bench (with an API key)"} if is_secret else {}),
        "config": asdict(config) | {"api_key": None, "header": len(config.header)},
        "limits_s": config.goodput_limits(),
        "targets": targets,
        "ratios": ratios(*(one.summary for one in measured)) if len(measured) == 2 else None,
    }
    return msgspec.json.format(msgspec.json.encode(result), indent=1)


def _noting(bar: tqdm) -> OnDone:
    errors = 0

    def note(record: RequestRecord) -> None:
        nonlocal errors
        if record.error:
            errors += 1
            bar.set_postfix(errors=errors, refresh=False)
        bar.update()

    return note


def _reversed(request: BenchRequest) -> BenchRequest:
    """Another prompt, to cache nothing measured."""
    words = request.prompt
    prompt = " ".join(reversed(words.split())) if isinstance(words, str) else tuple(reversed(words))
    messages = tuple(
        {**one, "content": " ".join(reversed(text.split()))} if isinstance(text := one["content"], str) else one
        for one in request.messages
    )
    return replace(request, idx=-1, prompt=prompt, messages=messages, output_len=min(request.output_len, 4), at_s=None)


def _error_examples(records: Sequence[RequestRecord]) -> list[str]:
    first: dict[str, RequestRecord] = {}
    for record in records:
        if record.error:
            first.setdefault(record.error, record)
    return [f"{kind}, e.g. request {record.idx}: {record.detail}" for kind, record in sorted(first.items())]
