"""The replay of request traces through the policies, on a small trace of the same form as Mooncake's."""

import gzip
import json
import random
from pathlib import Path

import pytest

from tests.router import trace_policies
from tests.router.trace_workers import TRACE_BLOCK_TOKENS, PrefillModel, TraceRequest, read_trace

MODEL = PrefillModel(num_workers=4, cache_tokens=200_000)


def write_trace(path: Path, *, conversations: int = 13, turns: int = 5) -> Path:
    """Conversations whose next prompt is the last one and more; times rounded to 3 s, as in the originals."""
    rng, names, rows = random.Random(5), iter(range(10**6)), []
    for _ in range(conversations):
        start_ms, blocks = rng.randrange(30_000), [0]
        for turn in range(turns):
            blocks = [*blocks, *(next(names) + 1 for _ in range(rng.randrange(2, 12)))]
            row = {
                "timestamp": (start_ms + turn * 12_000 + rng.randrange(9000)) // 3000 * 3000,
                "input_length": len(blocks) * TRACE_BLOCK_TOKENS - rng.randrange(TRACE_BLOCK_TOKENS),
                "output_length": rng.randrange(1, 300),
                "hash_ids": blocks,
            }
            rows.append(row)
    lines = [json.dumps(row) for row in sorted(rows, key=lambda row: row["timestamp"])]
    text = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> list[TraceRequest]:
    return read_trace(write_trace(tmp_path_factory.mktemp("trace") / "small.jsonl"))


def test_requests_of_one_time_are_spread_until_the_next(tmp_path: Path) -> None:
    rows = [{"timestamp": t, "input_length": 9, "output_length": 1, "hash_ids": [1]} for t in (0, 0, 0, 3000, 6000)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [request.at_s for request in read_trace(tmp_path / "t.jsonl")] == [0, 1, 2, 3, 6]
    assert [request.at_s for request in read_trace(tmp_path / "t.jsonl", speed=2)] == [0, 0.5, 1, 1.5, 3]


@pytest.mark.parametrize("line", ["{", "[]", '{"timestamp": 1}', '{"timestamp": "x"}'])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    good = '{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1]}'
    (tmp_path / "t.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2: no request of a trace"):
        read_trace(tmp_path / "t.jsonl")


def test_the_policies_differ_as_they_should(trace: list[TraceRequest]) -> None:
    rows = {name: trace_policies.prefill_row(name, trace, MODEL) for name in trace_policies.PREFILL}
    aware = ("cache_aware", "cache_aware, KV events", "consistent_hashing", "longest prefix")
    blind = [name for name in rows if name not in aware]
    assert min(rows[name]["hit_rate"] for name in aware) > 1.5 * max(rows[name]["hit_rate"] for name in blind)
    assert rows["cache_aware"]["ttft_p99_s"] <= min(rows[name]["ttft_p99_s"] for name in blind)
    assert rows["least_load"]["queue_tokens_p99"] <= rows["random"]["queue_tokens_p99"]
    assert rows == {name: trace_policies.prefill_row(name, trace, MODEL) for name in trace_policies.PREFILL}
