"""`tandem bench` against a router with a pair: each API, and every token counted by the server."""

import json
from pathlib import Path

import pytest

from deploy.cli import main
from tests.e2e.cluster import Cluster


@pytest.mark.parametrize(
    ("backend", "source"), [("openai", "usage"), ("openai-chat", "usage"), ("sglang", "meta_info")]
)
def test_a_load_through_a_router_is_counted_by_the_server(
    nixl: Cluster, tmp_path: Path, backend: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    prompts = [{"prompt": f"k{number:02d} v42 k03 v91", "output_tokens": 2 + number} for number in range(4)]
    rows.write_text("\n".join(map(json.dumps, prompts)))
    line = (
        f"bench --backend {backend} --base-url {nixl.router} --dataset-name custom --dataset-path {rows} --num-prompts 4 "
        f"--request-rate inf --max-concurrency 2 --goodput e2el:60000 --save-result --result-filename {tmp_path / 'r.json'}"
    )
    assert main([*line.split(), "--disable-tqdm"]) == 0
    text, result = capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 2 + 3 + 4 + 5)
    assert f"({source}), 14 output ({source})" in text and "goodput " in text and "4 of 4 requests within" in text
    assert result["total_input_tokens"] >= 16 and result["mean_ttft_ms"] > 0
