"""Statistics, workloads, traces and SSE of the bench: literals only."""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bench.config import BenchConfig, check_bench
from deploy.bench.load import shares
from deploy.bench.stats import (
    RequestRecord,
    goodput_line,
    latency_table,
    percentile,
    ratios,
    summarize,
    summary_lines,
)
from deploy.bench.workload import PromptTokens, TraceEntry, block_tokens, make_requests, parse_trace, read_trace
from deploy.openai_api import SseParser
from service.flags import ConfigError


def test_percentiles_interpolate() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, p) for p in (0, 50, 90, 100)] == [1.0, 2.5, pytest.approx(3.7), 4.0]
    assert percentile([7.0], 99) == 7.0


def record(idx: int, ttft_s: float, gaps: list[float], *, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        idx=idx,
        sent_s=0.0,
        ttft_s=ttft_s,
        itl_s=gaps,
        e2e_s=ttft_s + sum(gaps),
        prompt_tokens=10,
        output_tokens=1 + len(gaps),
        error=error,
    )


def test_summary_counts_good_answers_only() -> None:
    records = [record(0, 0.1, [0.02, 0.04]), record(1, 0.3, []), record(2, 9.0, [9.0], error="http 503")]
    summary = summarize(records, duration_s=2.0)
    assert (summary.requests, summary.completed, summary.errors) == (3, 2, {"http 503": 1})
    assert (summary.requests_per_s, summary.input_tokens_per_s, summary.output_tokens_per_s) == (1.0, 10.0, 2.0)
    assert summary.ttft_s is not None and summary.ttft_s.p50 == pytest.approx(0.2) and summary.ttft_s.max == 0.3
    assert summary.itl_s is not None and summary.itl_s.count == 2
    assert summary.tpot_s is not None and summary.tpot_s.mean == pytest.approx(0.03) and summary.tpot_s.count == 1


def test_no_good_answer_is_a_summary_too() -> None:
    summary = summarize([record(0, 1.0, [], error="connect")], duration_s=0.0)
    assert summary.ttft_s is None and summary.requests_per_s == 0.0
    assert "connect: 1" in summary_lines(summary)[0]


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 0.2}, 1),
        ({"ttft": 0.3}, 2),
        ({"tpot": 0.025}, 1),  # an answer of one token has none
        ({"e2el": 0.16}, 1),
        ({"ttft": 0.3, "tpot": 0.03, "e2el": 0.3}, 2),
        ({"ttft": 0.3, "tpot": 0.03, "e2el": 0.15}, 0),
    ],
)
def test_goodput_counts_requests_within_all_limits(limits: dict[str, float], good: int) -> None:
    records = [record(0, 0.1, [0.02, 0.04]), record(1, 0.3, []), record(2, 0.0, [], error="http 503")]
    line = goodput_line(records, limits, duration_s=2.0)
    assert line.startswith(f"goodput      {good / 2:.2f} req/s: {good} of 3 requests within ")


def test_percentiles_are_those_that_were_wished() -> None:
    records = [record(number, 0.1 * number, [0.01] * 3) for number in range(1, 6)]
    lines = latency_table(records, metrics=("e2el", "ttft"), percents=(50, 99.5)).splitlines()
    assert lines[0].split() == ["|", "|", "mean", "|", "p50", "|", "p99.5", "|", "max", "|"]
    assert [line.split()[1] for line in lines[2:]] == ["E2EL", "TTFT"]
    assert lines[3].split()[4:9:2] == ["300.00", "300.00", "498.00"]


def test_ratios_are_second_over_first() -> None:
    slow, fast = summarize([record(0, 0.4, [0.2])], duration_s=2.0), summarize([record(0, 0.1, [0.1])], duration_s=1.0)
    found = ratios(slow, fast)
    assert found["ttft_s_p50"] == pytest.approx(0.25) and found["itl_s_p50"] == pytest.approx(0.5)
    assert found["requests_per_s"] == pytest.approx(2.0)


@given(st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b and b"\r" not in b), max_size=8), st.data())
def test_sse_survives_every_cut(payloads: list[bytes], data: st.DataObject) -> None:
    text = b"".join(b"data: " + payload + b"\r\n\r\n: comment\n" for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parser = SseParser()
    parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert [got for part in parts for got in parser.feed(part)] == [payload.strip() for payload in payloads]


def test_the_same_flags_give_the_same_load_of_exact_lengths() -> None:
    config = BenchConfig(num_requests=20, input_len=40, output_len=8, prompt="ids", random_range_ratio=0.5, seed=3)
    requests = make_requests(config)
    assert requests == make_requests(config) and requests != make_requests(BenchConfig(num_requests=20, input_len=40))
    assert all(len(r.prompt) == r.prompt_len and 20 <= r.prompt_len <= 40 and 4 <= r.output_len <= 8 for r in requests)
    assert all(16 <= token <= 500 for r in requests for token in r.prompt if isinstance(token, int))
    assert all(r.at_s is None for r in requests)


def test_groups_share_their_prefix() -> None:
    config = BenchConfig(num_requests=4, input_len=20, shared_prefix_len=10, shared_prefix_groups=2, prompt="ids")
    prefixes = [request.prompt[:10] for request in make_requests(config)]
    assert prefixes[0] == prefixes[2] != prefixes[1] == prefixes[3]
    assert len({request.prompt for request in make_requests(config)}) == 4


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_bursts_have_the_same_rate_and_other_gaps(burstiness: float) -> None:
    config = BenchConfig(num_requests=4000, input_len=1, request_rate=50.0, burstiness=burstiness)
    times = [r.at_s or 0.0 for r in make_requests(config)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.2)  # of a gamma distribution


TRACE = b"""{"timestamp": 1000, "input_length": 1000, "output_length": 100, "hash_ids": [1, 2]}

{"timestamp": 4000, "input_length": 1100, "output_length": 50, "hash_ids": [1, 3, 4], "unknown": 1}
"""


def test_a_trace_is_scaled_and_equal_blocks_share_a_prefix() -> None:
    config = BenchConfig(trace="t", time_scale=0.1, length_scale=0.125, prompt="ids")
    first, second = make_requests(config, parse_trace(TRACE, name="t"))
    assert (first.at_s, second.at_s) == (0.0, pytest.approx(0.3))
    assert (first.prompt_len, second.prompt_len) == (125, 138)
    assert (first.output_len, second.output_len) == (12, 6)
    assert first.prompt[:64] == second.prompt[:64] and first.prompt[64:] != second.prompt[64:125]


@given(st.integers(1, 3000), st.floats(0.01, 2.0))
def test_a_traced_prompt_has_its_exact_scaled_length(length: int, scale: float) -> None:
    entry = TraceEntry(timestamp_ms=0, input_length=length, output_length=1, hash_ids=tuple(range(-(-length // 512))))
    tokens = PromptTokens(16, 500, as_words=False)
    assert len(block_tokens(entry, tokens, length_scale=scale, seed=0)) == max(1, round(length * scale))


def test_traces_may_be_gzipped_and_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(TRACE))
    assert read_trace(str(path)) == parse_trace(TRACE, name="t")
    with pytest.raises(ConfigError, match=r"line 2: .*input_length"):
        parse_trace(TRACE.splitlines()[0] + b"\n" + json.dumps({"timestamp": 1}).encode(), name="t")
    with pytest.raises(ConfigError, match="holds no request"):
        parse_trace(b"\n", name="t")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(str(tmp_path / "none"))
    path.write_bytes(b"\x1f\x8bjunk")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(str(path))


def test_rounds_share_the_requests_and_restart_the_clock() -> None:
    requests = make_requests(BenchConfig(num_requests=7, input_len=1, request_rate=10.0))
    parts = shares(requests, 3)
    assert [r.idx for part in parts for r in part] == list(range(7)) and [len(p) for p in parts] == [2, 2, 3]
    assert all(part[0].at_s == 0.0 for part in parts)
    assert len(shares(requests[:2], 5)) == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"url": "x:1"}, "--url: 'x:1' is no address"),
        ({"compare": "localhost"}, "--compare"),
        ({"trace": "t", "request_rate": 1.0}, "--request-rate: a trace has its own"),
        ({"min_token_id": 9, "max_token_id": 9}, "--max-token-id"),
        ({"shared_prefix_len": 300}, "--shared-prefix-len: must not exceed --input-len"),
        ({"api": "chat", "prompt": "ids"}, "--prompt ids: a chat has texts"),
        ({"dataset_name": "sharegpt"}, "--dataset-path: --dataset-name sharegpt reads a file; give its path"),
        ({"dataset_path": "x"}, "--dataset-path: what is in it"),
        ({"dataset_name": "custom", "dataset_path": "x", "trace": "y"}, "--trace: prompts come from --dataset-path"),
        ({"goodput": ("itl:5",)}, "--goodput itl:5: write METRIC:MS with one of ttft, tpot, e2el"),
        ({"goodput": ("ttft",)}, "--goodput ttft: '' is no number; write milliseconds"),
        ({"goodput": ("ttft:-1",)}, "--goodput ttft:-1: -1 is out of range"),
        ({"percentile_metrics": "ttft,x"}, "--percentile-metrics: 'x' is not measured; name some of ttft, tpot"),
        ({"metric_percentiles": "50,101"}, "--metric-percentiles: 101 is out of range; write numbers from 0 to 100"),
        ({"metric_percentiles": "p50"}, "--metric-percentiles: 'p50' is no number"),
        ({"save_detailed": True}, "--save-detailed: needs --save-result"),
        ({"output_details": True}, "--output-details: needs --output-file"),
        ({"append_result": True}, "--append-result: to which file"),
        ({"compare": "http://a", "save_result": True}, "--save-result: holds the result of one server"),
        ({"compare": "http://a", "output_file": "x"}, "--output-file: holds the result of one server"),
        ({"output": "/no/such/x"}, "--output: /no/such is no directory"),
        ({"metadata": ("x",)}, "--metadata x: write NAME=VALUE"),
        ({"header": ("=x",)}, "--header =x: write NAME=VALUE"),
        ({"extra_request_body": "{"}, "--extra-request-body: is no JSON"),
        ({"extra_request_body": "[1]"}, "--extra-request-body: must be a JSON object"),
    ],
)
def test_values_that_make_no_load_are_named(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_bench(BenchConfig(**flags))
