"""One run of the bench, from config to result."""

from collections.abc import Sequence
from dataclasses import asdict

import aiohttp
import msgspec
from tqdm import tqdm  # type: ignore[import-untyped]

from deploy.bench.config import BenchConfig
from deploy.bench.environment import describe
from deploy.bench.load import Measured, Target, run_in_turns, run_load
from deploy.bench.stats import RequestRecord, Summary, ratio_table, ratios, summarize, summary_table
from deploy.bench.workload import BenchRequest, make_requests, read_trace
from deploy.openai_api import first_model


async def measure(config: BenchConfig) -> list[Measured]:
    """Warm up, then load one target, or two in turns."""
    requests = make_requests(config, read_trace(config.trace) if config.trace else ())
    async with open_session(config.api_key) as session:
        targets = [
            Target(url, session=session, config=config, model=config.model or await first_model(session, url))
            for url in config.urls
        ]
        for target in targets:
            await run_load(target.send, _warmup(requests, config.warmup), concurrency=1)
        with tqdm(total=len(requests) * len(targets), unit="req", disable=config.disable_progress or None) as bar:
            return await run_in_turns(
                [target.send for target in targets],
                requests,
                rounds=config.rounds if len(targets) > 1 else 1,
                concurrency=config.concurrency,
                on_done=_Progress(bar),
            )


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, connect=30),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        trust_env=False,
        read_bufsize=1 << 20,
    )


def print_report(urls: Sequence[str], measured: Sequence[Measured]) -> list[Summary]:
    summaries = [summarize(one.records, duration_s=one.duration_s) for one in measured]
    for url, one, summary in zip(urls, measured, summaries, strict=True):
        print(f"\n{url}\n\n{summary_table(summary)}")
        for line in _error_examples(one.records):
            print(line)
    if len(urls) == 2:
        print("\n" + ratio_table(ratios(*summaries), first=urls[0], second=urls[1]))
    return summaries


def result_json(config: BenchConfig, measured: Sequence[Measured], summaries: Sequence[Summary]) -> bytes:
    """Return the result with all records, without API key."""
    targets = [
        {"url": url, "summary": summary, "records": one.records}
        for url, summary, one in zip(config.urls, summaries, measured, strict=True)
    ]
    result = {
        "environment": describe() | ({"command": "tandem bench (with an API key)"} if config.api_key else {}),
        "config": asdict(config) | {"api_key": None},
        "targets": targets,
        "ratios": ratios(*summaries) if len(summaries) == 2 else None,
    }
    return msgspec.json.format(msgspec.json.encode(result), indent=1)


class _Progress:
    def __init__(self, bar: tqdm) -> None:
        self._bar = bar
        self._errors = 0

    def __call__(self, record: RequestRecord) -> None:
        if record.error:
            self._errors += 1
            self._bar.set_postfix(errors=self._errors, refresh=False)
        self._bar.update()


def _warmup(requests: Sequence[BenchRequest], count: int) -> list[BenchRequest]:
    """Return requests with other prompts, to cache nothing measured."""
    return [_reversed(request) for request in requests[:count]]


def _reversed(request: BenchRequest) -> BenchRequest:
    words = request.prompt
    prompt = " ".join(reversed(words.split())) if isinstance(words, str) else tuple(reversed(words))
    return BenchRequest(idx=-1, prompt=prompt, prompt_len=request.prompt_len, output_len=min(request.output_len, 4))


def _error_examples(records: Sequence[RequestRecord]) -> list[str]:
    first: dict[str, RequestRecord] = {}
    for record in records:
        if record.error:
            first.setdefault(record.error, record)
    return [f"{kind}, e.g. request {record.idx}: {record.detail}" for kind, record in sorted(first.items())]
