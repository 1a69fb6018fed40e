"""The conditions of a measurement: server, model, load, client."""

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from deploy.bench.config import CHAT, GENERATE, RANDOM, SAMPLING, BenchConfig
from deploy.bench.target import PATHS
from deploy.bench.workload import BenchRequest
from deploy.openai_api import hint_for, message_of, why_no_answer
from service.flags import ConfigError

REPLY_S = 30.0
UNNAMED = "default"  # /generate needs no model's name


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """`version`: "" if it reports none."""

    url: str
    model: str
    version: str


async def find_server(session: aiohttp.ClientSession, url: str, config: BenchConfig) -> ServerFacts:
    """Find the model's name and check that the server has it. Raises ConfigError."""
    names = await _models(session, url, config)
    wanted = config.served_model_name or config.model
    if wanted is None and not names:
        raise ConfigError(f"--url {url}: /v1/models names no model; give --model")
    model = wanted or names[0]
    if names and wanted not in (None, *names) and config.api != GENERATE:
        await _check_model(session, url, config, model, names)
    return ServerFacts(url=url, model=model, version=await _version(session, url))


def describe_load(config: BenchConfig, requests: list[BenchRequest]) -> list[tuple[str, str]]:
    """`requests`: with their lengths."""
    sampling = {"temperature": config.temperature, **config.sampling()}
    values = ", ".join(f"{name} {value:g}" for name, value in sampling.items() if name in ("temperature", *SAMPLING))
    lengths = "ignore_eos" if config.ignore_eos else "answers end at eos"
    return [
        ("dataset", f"{_dataset(config)}: {len(requests)} requests, {_lengths(config, requests)}"),
        ("load", f"{_load(config)}; {config.warmup} to warm up; {'streams' if config.stream else 'no streams'}"),
        ("sampling", f"{values}, {lengths}{', ' + config.extra_request_body if config.extra_request_body else ''}"),
        ("seed", str(config.seed)),
    ]


def describe_client(environment: dict[str, Any]) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    gpu = f", {environment['gpu'].replace(chr(10), ', ')}" if environment["gpu"] else ""
    commit = f"; commit {environment['commit']}" if environment["commit"] else ""
    return [
        ("client", f"{environment['cpu']}, {environment['cores']} cores, {environment['memory_gib']} GiB{gpu}"),
        ("system", f"{environment['system']}, Python {environment['python']}"),
        ("versions", f"{versions}{commit}; {environment['time']}"),
    ]


# ---- the server


async def _models(session: aiohttp.ClientSession, url: str, config: BenchConfig) -> list[str]:
    """None from a server without the route. Raises ConfigError."""
    path = "/v1/models"
    try:
        async with session.get(url.rstrip("/") + path, timeout=aiohttp.ClientTimeout(total=REPLY_S)) as reply:
            body = await reply.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConfigError(
            f"--url {url}: no answer ({why_no_answer(error)}); is the server up, and is this its address?"
        ) from None
    if reply.status in (401, 403):
        raise ConfigError(f"--url {url}: HTTP {reply.status}: {message_of(body)}{hint_for(401)}")
    if reply.status != 200:
        if config.model is None and config.served_model_name is None and config.api != GENERATE:
            raise ConfigError(
                f"--url {url}: HTTP {reply.status} from {path}: {message_of(body)}; give --model, or the address of an "
                "OpenAI-compatible server"
            )
        return [UNNAMED] if config.api == GENERATE else []
    try:
        return [str(card["id"]) for card in msgspec.json.decode(body)["data"]]
    except (msgspec.DecodeError, LookupError, TypeError):
        raise ConfigError(
            f"--url {url}: {path} is no list of models ({message_of(body)[:100]!r}); is this an OpenAI-compatible server?"
        ) from None


async def _check_model(
    session: aiohttp.ClientSession, url: str, config: BenchConfig, model: str, names: list[str]
) -> None:
    """Request one token: a server may take names that it does not list. Raises ConfigError."""
    prompt = {"messages": [{"role": "user", "content": "a"}]} if config.api == CHAT else {"prompt": "a"}
    try:
        async with asyncio.timeout(config.request_timeout_s):
            async with session.post(
                url.rstrip("/") + PATHS[config.api], json={"model": model, "max_tokens": 1, **prompt}
            ) as reply:
                body = await reply.read()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return  # the load shows it
    if reply.status in (400, 404, 422):
        raise ConfigError(
            f"--model {model}: {message_of(body).rstrip('.')}; the server has {', '.join(names)}: give one of these, or "
            "leave --model out"
        )


async def _version(session: aiohttp.ClientSession, url: str) -> str:
    for path in ("/version", "/server_info", "/get_server_info"):
        try:
            async with session.get(url.rstrip("/") + path, timeout=aiohttp.ClientTimeout(total=REPLY_S)) as reply:
                found = msgspec.json.decode(await reply.read()) if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            continue
        if isinstance(found, dict) and isinstance(found.get("version"), str):
            return str(found["version"])
    return ""


# ---- the load


def _dataset(config: BenchConfig) -> str:
    if config.trace is not None:
        return f"trace {config.trace}, times x {config.time_scale:g}, lengths x {config.length_scale:g}"
    if config.dataset_name == RANDOM:
        shared = f", {config.shared_prefix_len} shared" if config.shared_prefix_len else ""
        return f"random {config.prompt}{shared}"
    return f"{config.dataset_name} {config.dataset_path}"


def _lengths(config: BenchConfig, requests: list[BenchRequest]) -> str:
    size = max(len(requests), 1)
    output = sum(request.output_len for request in requests) / size
    prompt = sum(request.prompt_len for request in requests) / size
    unit = "words" if config.prompt == "words" and config.dataset_name == RANDOM else "tokens"
    before = f"{prompt:,.0f} {unit} in, " if prompt else ""
    return f"{before}{output:,.0f} tokens out on average"


def _load(config: BenchConfig) -> str:
    limit = "" if config.concurrency is None else f", at most {config.concurrency} at a time"
    if config.trace is not None:
        return f"at the times of the trace{limit}"
    if config.request_rate is None:
        return f"closed loop, {config.in_flight} at a time"
    if config.request_rate == math.inf:
        return f"all at once{limit}"
    gaps = "Poisson" if config.burstiness == 1 else f"gamma, burstiness {config.burstiness:g}"
    return f"{config.request_rate:g} requests a second ({gaps}){limit}"
