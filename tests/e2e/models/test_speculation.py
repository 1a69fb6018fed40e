"""Speculation through two workers: the tokens of plain decoding in a part of the steps, also after a retraction and between ranks."""

import json
import random
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.e2e.cluster import tandem
from tests.e2e.ranks.test_rank_pairs import Cell, pair_of
from tests.e2e.two_engines import disaggregated, run
from tests.e2e.workload import recall_prompt
from tools.recall.oracle import continuation

NEW = 60
RNG = random.Random(5)
ASKED = [(f"r{i}", recall_prompt(RNG, 40), NEW) for i in range(4)]
RIGHT = {rid: continuation(prompt, new, ignore_eos=True) for rid, prompt, new in ASKED}
NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM"}
FLAGS: dict[str, Any] = {"chunked_prefill_size": 32, "max_total_tokens": 8192}
TIGHT = {"max_total_tokens": 464, "schedule_conservativeness": 0.0}  # what runs is retracted


@pytest.mark.parametrize(("backend", "backup"), [("nixl", "host"), ("mooncake", "recompute")])
def test_a_pair_gives_the_tokens_of_plain_decoding(backend: str, backup: str) -> None:
    """The model repeats its prompt, so nearly every draft is right, from the first step after the hand-over on."""
    disagg = {"disaggregation_transfer_backend": backend, "disaggregation_decode_retraction_backup": backup}
    with disaggregated(WIDE_MODEL_PATH, decode={**TIGHT, **NGRAM}, disagg=disagg, **FLAGS) as pair:
        assert run(pair, ASKED, together=len(ASKED), turns_between=6) == RIGHT
        counters = pair.workers[1].parts.scheduler.counters
    assert counters.retractions > 0 and counters.accepted_drafts > 0.8 * counters.drafts
    assert counters.steps < NEW


def test_ranks_of_a_pair_verify_the_same_drafts() -> None:
    cell = Cell("nixl", (1, 1), (2, 1), "on", "host")
    with pair_of(cell, flags={**FLAGS, "num_threads": 1, "kv_units": 2}, decode=NGRAM) as pair:
        assert run(pair, ASKED, together=len(ASKED), turns_between=6) == RIGHT
        counters = pair.workers[1].parts.scheduler.counters
    assert counters.accepted_drafts > 0.8 * counters.drafts > 0 and counters.steps < NEW


def test_a_server_says_how_drafts_fared(tmp_path: Path) -> None:
    """In `meta_info` and /metrics; a stream's chunks hold the same tokens, several at a time."""
    rid, prompt, new = ASKED[0]
    flags = ("--model-path", WIDE_MODEL_PATH, "--max-total-tokens", "8192", "--speculative-algorithm", "NGRAM")
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}}
    with tandem(tmp_path, "serve", "--port", "0", *flags) as server:
        answer = json.loads(_post(f"{server.url}/generate", body))
        lines = _post(f"{server.url}/generate", {**body, "stream": True}).decode().splitlines()
        with urlopen(f"{server.url}/metrics", timeout=30) as shown:
            metrics = shown.read().decode()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert answer["output_ids"] == chunks[-1]["output_ids"] == RIGHT[rid] and len(chunks) < new / 3
    info, streamed = answer["meta_info"], chunks[-1]["meta_info"]
    assert info["spec_verify_ct"] + info["spec_accept_token_num"] == new - 1  # all but the prompt's
    assert (
        info["spec_accept_length"] == pytest.approx((new - 1) / info["spec_verify_ct"])
        and info["spec_accept_length"] > 3
    )
    assert info["spec_accept_token_num"] == pytest.approx(info["spec_accept_rate"] * info["spec_draft_token_num"])
    accepted = info["spec_accept_token_num"] + streamed["spec_accept_token_num"]
    (line,) = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
    assert float(line.split()[-1]) == accepted


def _post(url: str, body: dict[str, Any]) -> bytes:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as response:
        return bytes(response.read())
