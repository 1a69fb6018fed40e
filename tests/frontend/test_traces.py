"""POST /traces of a worker: one record a sample, and only for requests that asked the engine to generate."""

from typing import Any

from tests.frontend.conftest import Worker


def records(worker: Worker, request_id: str) -> list[dict[str, Any]]:
    answer = worker.post("/traces", {"ids": [request_id]})
    assert answer.status_code == 200
    return answer.json()["records"]  # type: ignore[no-any-return]


def test_each_sample_has_its_record(worker: Worker) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, "n": 2}
    assert worker.post("/v1/chat/completions", body, headers={"X-Request-Id": "two"}).status_code == 200
    found = records(worker, "two")
    assert len(found) == 2 and len({record["attributes"]["gen_ai.response.id"] for record in found}) == 2
    for record in found:
        assert record["process"] == "unified" and record["operation"] == "chat" and record["model"] == "tiny"
        assert "tandem.dp_rank" not in record["attributes"]
        assert record["attributes"]["gen_ai.usage.output_tokens"] == 3 and "error" not in record
        assert record["attributes"]["gen_ai.response.finish_reasons"] == ["length"]
        assert 1e9 < record["start_s"] <= record["end_s"], "seconds of the Unix epoch"
    last = worker.post("/traces", {"last": 1}).json()["records"]
    assert {record["request_id"] for record in last} == {"two"}


def test_probes_and_refused_requests_have_none(worker: Worker) -> None:
    assert worker.http.get("/health_generate", headers={"X-Request-Id": "probe"}).status_code == 200
    assert worker.post("/generate", {"text": 7}, headers={"X-Request-Id": "refused"}).status_code == 400
    assert records(worker, "probe") == [] == records(worker, "refused")


def test_bad_queries(worker: Worker) -> None:
    for body, field in (({}, "ids"), ({"last": 0}, "last"), ({"last": 2, "ids": ["a"]}, "ids"), ({"first": 1}, None)):
        error = worker.error("/traces", body)
        assert field is None or error["param"] == field
