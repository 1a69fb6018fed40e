"""SGLang's native API and everything around generation: information, load, metrics, aborts, cache, health."""

import contextlib
import itertools
import json
import re
import socket
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from engine.frontend.metrics.worker import Metrics
from tests.frontend.conftest import CONTEXT, Worker, start_worker, wait_for
from tests.frontend.stand_in import NUM_PAGES, PAGE_SIZE

CHAT = {"messages": [{"role": "user", "content": "x"}]}


def test_generate_text_and_ids(worker: Worker) -> None:
    answer = worker.post("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 4}}).json()
    assert answer["text"] == "hel" and len(answer["output_ids"]) == 4
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (6, 4, 4)
    assert meta["cached_tokens_details"] == {"device": 1, "host": 3, "storage": 0}
    ids = worker.post("/generate", {"input_ids": [70, 71], "sampling_params": {"max_new_tokens": 2}}).json()
    assert ids["output_ids"] == [70, 71]
    assert isinstance(ids["meta_info"]["id"], str) and ids["meta_info"]["e2e_latency"] > 0


def test_generate_batch_with_own_parameters_and_ids(worker: Worker) -> None:
    params: object = [{"max_new_tokens": 2}, {"max_new_tokens": 3}]
    answers = worker.post("/generate", {"text": ["ab", "cd"], "sampling_params": params, "rid": ["one", "two"]}).json()
    assert [a["text"] for a in answers] == ["a", "cd"] and [a["meta_info"]["id"] for a in answers] == ["one", "two"]
    params = {"max_new_tokens": 1, "n": 2}
    answers = worker.post("/generate", {"input_ids": [[70], [71]], "sampling_params": params, "rid": "r"}).json()
    assert [a["output_ids"] for a in answers] == [[70], [70], [71], [71]]
    assert [a["meta_info"]["id"] for a in answers] == ["r_0-0", "r_0-1", "r_1-0", "r_1-1"]
    sent = worker.scheduler.batches[-1]  # all in one message: no step begins with a part of them
    assert [rid.rsplit(":", 1)[0] for rid in sent] == ["r_0-0", "r_0-1", "r_1-0", "r_1-1"]


def test_default_limit_is_cut_to_what_fits_and_an_explicit_one_is_not(worker: Worker) -> None:
    assert worker.post("/generate", {"input_ids": [70]}).json()["meta_info"]["completion_tokens"] == 128
    long = [70] * (CONTEXT - 7)
    assert worker.post("/generate", {"input_ids": long}).json()["meta_info"]["completion_tokens"] == 7
    body = {"input_ids": long, "sampling_params": {"max_new_tokens": None, "stop_token_ids": [70]}}
    stopped = worker.post("/generate", body).json()
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": 70} and stopped["text"] == ""
    error = worker.error("/generate", {"input_ids": long, "sampling_params": {"max_new_tokens": 128}})
    assert error["code"] == "context_length_exceeded"


def test_stream_is_cumulative(worker: Worker) -> None:
    chunks = worker.events("/generate", {"text": "né🎉", "sampling_params": {"max_new_tokens": 8}, "stream": True})
    assert chunks[-1]["text"] == "né🎉" and chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"
    for a, b in itertools.pairwise(chunks):
        assert b["text"].startswith(a["text"])
        assert b["meta_info"]["completion_tokens"] > a["meta_info"]["completion_tokens"]
    body = {"input_ids": [[70], [71]], "sampling_params": {"max_new_tokens": 2}, "stream": True}
    assert {event["index"] for event in worker.events("/generate", body)} == {0, 1}


def test_logprobs(worker: Worker) -> None:
    body: dict[str, Any] = {"input_ids": [70, 71, 72], "sampling_params": {"max_new_tokens": 2}}
    body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = worker.post("/generate", body).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 70, None], [-0.5, 71, None], [-0.5, 72, None]]
    assert meta["output_token_logprobs"] == [[-0.5, 70, None], [-0.5, 71, None]]
    assert meta["input_top_logprobs"][0] is None
    assert meta["output_top_logprobs"][0] == [[-0.5, 70, None], [-1.5, 71, None]]
    body |= {"logprob_start_len": -1, "return_text_in_logprobs": True, "top_logprobs_num": 0}
    meta = worker.post("/generate", body).json()["meta_info"]
    assert meta["input_token_logprobs"] == [] and "output_top_logprobs" not in meta
    assert all(isinstance(row[2], str) for row in meta["output_token_logprobs"])


def test_abort_by_rid_and_all(worker: Worker) -> None:
    for abort in ({"rid": "mine"}, {"abort_all": True}):
        with worker.stream("SLOW", rid="mine") as last:
            assert worker.error("/generate", {"text": "x", "rid": "mine"})["param"] == "rid"
            assert worker.post("/abort_request", abort).status_code == 200
            assert last()["meta_info"]["finish_reason"]["type"] == "abort"
        worker.wait_idle()
    assert worker.post("/abort_request", {"rid": "unknown"}).status_code == 200
    assert worker.post("/generate", {"text": "x", "rid": "mine"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_client_that_goes_away_aborts_its_samples(worker: Worker, path: str, stream: bool) -> None:
    before, seen = len(worker.scheduler.aborted), len(worker.scheduler.seen)
    prompts = {"text" if path == "/generate" else "prompt": ["SLOW 1", "SLOW 2", "ab"]}
    with worker.http.stream("POST", path, json={**prompts, "stream": True}) if stream else _hung(worker, path, prompts):
        wait_for(lambda: len(worker.scheduler.seen) == seen + 3)
    wait_for(lambda: len(worker.scheduler.aborted) >= before + 2)
    worker.wait_idle()
    assert {r.rsplit(":", 1)[0] for r in worker.scheduler.aborted[before:]} <= {
        r.rid.rsplit(":", 1)[0] for r in worker.scheduler.seen[seen:]
    }


def _hung(worker: Worker, path: str, body: object) -> contextlib.closing[socket.socket]:
    parts, data = urlsplit(worker.url), json.dumps(body).encode()
    sock = socket.create_connection((parts.hostname, parts.port))
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return contextlib.closing(sock)


def test_information(worker: Worker) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = worker.http.get(path).json()
        assert info["served_model_name"] == "tiny" and info["disaggregation_mode"] == "null" and info["page_size"] == 16
        assert info["num_running_reqs"] == 0 and info["num_queued_reqs"] == 2
        assert info["max_total_num_tokens"] == NUM_PAGES * PAGE_SIZE
        assert info["internal_states"][0]["num_used_tokens"] == 0 and "api_key" not in info and info["device"] == "none"
        assert info["internal_states"][0]["avg_spec_accept_length"] == 2.5
    for path in ("/model_info", "/get_model_info"):
        info = worker.http.get(path).json()
        assert info["architectures"] == ["Qwen3ForCausalLM"] and info["is_generation"] is True
        assert info["max_model_len"] == CONTEXT
    assert worker.http.get("/get_weight_version").json() == {"weight_version": info["weight_version"]}  # slime reads it
    assert [card["owned_by"] for card in worker.http.get("/v1/models").json()["data"]] == ["sglang"]  # SMG reads it
    (load,) = worker.http.get("/get_load").json()
    assert load == {"dp_rank": 0, "num_reqs": 2, "num_waiting_reqs": 2, "num_tokens": 0}
    loads = worker.http.get("/v1/loads?include=core,disagg").json()
    assert loads["dp_rank_count"] == 1 and datetime.fromisoformat(loads["timestamp"]).tzinfo is not None
    (entry,) = loads["loads"]
    assert (entry["num_waiting_reqs"], entry["num_running_reqs"], entry["num_total_reqs"]) == (0, 0, 0)
    assert worker.http.get("/loads").json()["loads"] == [entry]
    assert entry["disaggregation"]["decode_prealloc_queue_reqs"] == 2 and entry["max_running_requests"] == 64
    assert (entry["totals"]["prompt_tokens"], entry["totals"]["cached_tokens"]) == (10, 5)
    assert entry["speculative"] == {"accept_length": 2.5, "accept_rate": 0.75}


def test_used_tokens_show_while_running(worker: Worker) -> None:
    with worker.http.stream("POST", "/generate", json={"text": "SLOW", "stream": True}):
        wait_for(lambda: worker.http.get("/get_load").json()[0]["num_tokens"] == PAGE_SIZE)
        assert "running" in worker.error("/flush_cache", None)["message"]
    worker.wait_idle()
    flushed = worker.http.get("/flush_cache")
    assert (flushed.text, flushed.headers["Content-Type"]) == ("flushed\n", "text/plain; charset=utf-8")


def test_counters_begin_at_zero(worker: Worker) -> None:
    """`rate()` does not see the event with which a series begins."""
    reasons = ("stop", "length", "abort", "error", "moved")
    shown = Metrics(model_name="m", mode="null").exposition().decode()
    for reason in reasons:
        labels = f'engine_type="unified",finished_reason="{reason}",model_name="m"'
        assert f"vllm:request_success_total{{{labels}}} 0.0" in shown
    text = worker.http.get("/metrics").text  # no API has PUT
    put = r'endpoint="/generate",engine_type="unified",method="PUT",model_name="tiny"'
    assert f"sglang:http_requests_total{{{put}}} 0.0" in text
    assert f'sglang:http_responses_total{{{put},status_code="503"}} 0.0' in text


def test_metrics_have_a_head_and_the_counts_of_the_scheduler(worker: Worker) -> None:
    text = worker.http.get("/metrics").text
    assert re.search(r"^sglang:cache_hit_rate\{.*\} 0\.5$", text, re.MULTILINE)
    assert re.search(r"^sglang:num_transfer_failed_reqs_total\{.*\} 3\.0$", text, re.MULTILINE)
    assert worker.http.head("/metrics").status_code == 200


def test_check_reports_problems(worker: Worker) -> None:
    good = worker.http.get("/check").json()
    assert good["ok"] is True and good["problems"] == []
    assert good["pages"]["free"] == NUM_PAGES and good["queues"]["prealloc"] == 2
    worker.scheduler.problems = ["page 7 has two owners"]
    try:
        bad = worker.http.get("/check").json()
        assert bad["ok"] is False and bad["problems"] == ["page 7 has two owners"]
    finally:
        worker.scheduler.problems = []


def test_tokenize_and_back(worker: Worker) -> None:
    tokens = worker.post("/tokenize", {"prompt": "né"}).json()
    assert tokens["count"] == 4 and tokens["tokens"][0] == 256
    assert worker.post("/v1/detokenize", {"tokens": tokens["tokens"]}).json() == {"text": "né"}


def test_request_id_is_echoed_also_on_errors_and_streams(worker: Worker) -> None:
    good = {"text": "a"}
    for path, body in (("/generate", good), ("/generate", {**good, "stream": True}), ("/generate", {}), ("/no", {})):
        assert worker.post(path, body, headers={"X-Request-ID": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(worker.post("/generate", {"text": "a"}).headers["x-request-id"]) == 32


def test_health_generates_a_real_token(worker: Worker) -> None:
    health = worker.http.get("/health").json()
    assert health["status"] == "ok" and worker.http.get("/health").json() == health  # one process, one incarnation
    seen = len(worker.scheduler.seen)
    assert worker.http.get("/health_generate").status_code == 200
    assert worker.scheduler.seen[seen].sampling.max_new_tokens == 1
    worker.wait_idle()


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_disaggregated_requests_carry_their_rooms(tmp_path: Path, mode: str) -> None:
    with start_worker(tmp_path, mode=mode) as w:
        where = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9000}
        many = {"input_ids": [[70], [71]], "sampling_params": {"max_new_tokens": 1, "n": 2}}
        cases: list[tuple[str, dict[str, object], list[int]]] = [
            ("/generate", {"input_ids": [70], "bootstrap_room": 5}, [5]),
            ("/generate", {**many, "bootstrap_room": 5}, [5, 6, 7, 8]),
            ("/v1/chat/completions", {**CHAT, "n": 2, "max_tokens": 1, "bootstrap_room": [8, 9]}, [8, 9]),
            ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "bootstrap_room": 2**62}, [2**62, 2**62 + 1]),
        ]
        for path, body, rooms in cases:
            got = [r.bootstrap for r in w.sent(path, {**where, **body})]
            assert [(b.host, b.port, b.room) for b in got if b] == [("10.0.0.1", 9000, room) for room in rooms]
        assert w.post("/generate", {"text": "a", "bootstrap_host": "2.2.2.2"}).status_code == 200
        assert w.http.get("/health_generate").status_code == 200
        fake = w.scheduler.seen[-1].bootstrap
        assert fake is not None and fake.host == "2.2.2.2" and fake.room > 0
        w.post("/generate", {"text": "a", "bootstrap_host": "h", "bootstrap_port": None, "bootstrap_room": 4})
        default = w.scheduler.seen[-1].bootstrap
        assert default is not None and default.port == 8998
        assert f'engine_type="{mode}"' in w.http.get("/metrics").text


def test_bootstrap_fields_mean_nothing_in_a_unified_worker(worker: Worker) -> None:
    (request,) = worker.sent("/generate", {"text": "a", "bootstrap_host": "h", "bootstrap_room": [1, 2, 3]})
    assert request.bootstrap is None
