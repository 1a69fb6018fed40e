"""One server's result in the files of `vllm bench serve` and `sglang.bench_serving`."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import msgspec

from deploy.bench.config import CHAT, COMPLETIONS, GENERATE, BenchConfig, pairs_of
from deploy.bench.load import Measured
from deploy.bench.stats import RequestRecord, Summary, is_good, latencies, percentile
from service.flags import ConfigError

VLLM_BACKENDS = {COMPLETIONS: "openai", CHAT: "openai-chat", GENERATE: "sglang"}
SGLANG_BACKENDS = {COMPLETIONS: "sglang-oai", CHAT: "sglang-oai-chat", GENERATE: "sglang"}
SGLANG_NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e_latency"}
SGLANG_PERCENTS = {"ttft": (99,), "tpot": (99,), "itl": (95, 99), "e2el": (90, 99)}


def save_results(config: BenchConfig, model: str, measured: Measured, *, now: datetime) -> list[str]:
    """Return the paths. Raises ConfigError."""
    written = []
    if config.save_result or config.append_result:
        path = Path(config.result_dir or ".") / (config.result_filename or result_filename(config, model, now=now))
        result = vllm_result(config, model, measured, now=now)
        _write("--result-dir" if config.result_dir else "--result-filename", path, result, adds=config.append_result)
        written.append(str(path))
    if config.output_file:
        _write("--output-file", Path(config.output_file), sglang_result(config, measured), adds=True)
        written.append(config.output_file)
    return written


def result_filename(config: BenchConfig, model: str, *, now: datetime) -> str:
    limit = "" if config.concurrency is None else f"-concurrency{config.concurrency}"
    name = model.rstrip("/").rpartition("/")[2]
    return f"{config.label or VLLM_BACKENDS[config.api]}-{_rate(config)}qps{limit}-{name}-{now:%Y%m%d-%H%M%S}.json"


def vllm_result(config: BenchConfig, model: str, measured: Measured, *, now: datetime) -> dict[str, Any]:
    limits, records, summary = config.goodput_limits(), measured.records, measured.summary
    good = sum(is_good(record, limits) for record in records)
    result: dict[str, Any] = {
        "date": f"{now:%Y%m%d-%H%M%S}",
        "endpoint_type": VLLM_BACKENDS[config.api],
        "backend": VLLM_BACKENDS[config.api],
        "label": config.label,
        "model_id": model,
        "tokenizer_id": config.tokenizer or model,
        "num_prompts": len(records),
        **pairs_of("--metadata", config.metadata),
        "request_rate": _rate(config),
        "burstiness": config.burstiness,
        "max_concurrency": config.concurrency,
        **_rates(summary),
        "failed": summary.requests - summary.completed,
        "request_goodput": good / summary.duration_s if limits and summary.duration_s else None,
        "total_token_throughput": summary.input_tokens_per_s + summary.output_tokens_per_s,
    }
    found = latencies(records)
    for name in config.metrics():
        result |= _spread(name, found[name], config.percents())
    return result | (_details(records) if config.save_detailed else {})


def sglang_result(config: BenchConfig, measured: Measured) -> dict[str, Any]:
    records, summary = measured.records, measured.summary
    result: dict[str, Any] = {
        "tag": config.label,
        "backend": SGLANG_BACKENDS[config.api],
        "dataset_name": "mooncake" if config.trace else config.dataset_name,
        "request_rate": _rate(config),
        "max_concurrency": config.concurrency,
        "sharegpt_output_len": config.dataset_output_len,
        "random_input_len": config.input_len,
        "random_output_len": config.output_len,
        "random_range_ratio": config.random_range_ratio,
        **_rates(summary),
        "input_throughput": summary.input_tokens_per_s,
        "total_throughput": summary.input_tokens_per_s + summary.output_tokens_per_s,
    }
    found = latencies(records)
    for metric, name in SGLANG_NAMES.items():
        result |= _spread(name, found[metric], SGLANG_PERCENTS[metric])
    result["max_itl_ms"] = 1000 * max(found["itl"], default=0.0)
    result["concurrency"] = sum(found["e2el"]) / summary.duration_s if summary.duration_s else 0.0
    return result | (_details(records) if config.output_details else {})


def _rates(summary: Summary) -> dict[str, float]:
    return {
        "duration": summary.duration_s,
        "completed": summary.completed,
        "total_input_tokens": summary.prompt_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.requests_per_s,
        "output_throughput": summary.output_tokens_per_s,
    }


def _spread(name: str, values: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    """Milliseconds; of no value they are 0, as in both tools."""
    ms = [1000 * value for value in values] or [0.0]
    found = {f"mean_{name}_ms": fmean(ms), f"median_{name}_ms": percentile(ms, 50), f"std_{name}_ms": pstdev(ms)}
    return found | {f"p{percent:g}_{name}_ms": percentile(ms, percent) for percent in percents}


def _details(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    ordered = sorted(records, key=lambda record: record.idx)
    return {
        "input_lens": [record.prompt_tokens for record in ordered],
        "output_lens": [record.output_tokens for record in ordered],
        "ttfts": [record.ttft_s or 0.0 for record in ordered],
        "itls": [record.itl_s for record in ordered],
        "latencies": [record.e2e_s for record in ordered],
        "start_times": [record.sent_s for record in ordered],
        "generated_texts": [record.text for record in ordered],
        "errors": [f"{record.error}: {record.detail}" if record.error else "" for record in ordered],
    }


def _rate(config: BenchConfig) -> float | str:
    """Also a closed loop is "inf", as in both tools."""
    rate = config.request_rate
    return "inf" if rate is None or rate == math.inf else rate


def _write(option: str, path: Path, result: Mapping[str, Any], *, adds: bool) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab" if adds else "wb") as file:
            file.write(msgspec.json.encode(result) + b"\n")
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}") from None
