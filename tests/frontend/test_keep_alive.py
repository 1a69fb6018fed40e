"""A worker keeps silent streams open by comments: before the first token, and in pauses."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from service.http.keep_alive import NO_BEATS_HEADER
from tests.frontend.conftest import Worker, start_worker

CHAT, COMMENT = "/v1/chat/completions", ": keep-alive"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with start_worker(tmp_path_factory.mktemp("alive"), server={"sse_keep_alive_interval_s": 0.04}) as started:
        yield started


def lines(response: httpx.Response) -> Iterator[str]:
    return (line for line in response.iter_lines() if line)


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "stream": True, **more}


def test_headers_come_before_the_first_token_and_an_error_after_them_is_an_event(tmp_path: Path) -> None:
    """The worker ends while the prompt is computed, and hands the request back."""
    with (
        start_worker(tmp_path, server={"sse_keep_alive_interval_s": 0.04}) as worker,
        worker.http.stream("POST", CHAT, json=body("HANG")) as response,
    ):
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"]
        read = lines(response)
        assert [next(read) for _ in range(3)] == [COMMENT] * 3
        worker.process.send_signal(signal.SIGTERM)
        (event,) = [line for line in read if line != COMMENT]
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "draining"


def test_a_pause_between_tokens_is_filled(worker: Worker) -> None:
    with worker.http.stream("POST", "/generate", json={"text": "SLOW", "stream": True}) as response:
        read = lines(response)
        seen = []
        while seen[-2:] != [COMMENT] * 2:
            seen.append(next(read))
    assert [line.startswith("data: {") for line in seen[:-2]] == [True] * (len(seen) - 2) and len(seen) > 2
    worker.wait_idle()


def test_an_error_in_time_has_its_status(worker: Worker) -> None:
    assert worker.post(CHAT, body("REFUSE")).status_code == 503


def test_a_router_that_sends_its_own_gets_none(worker: Worker) -> None:
    """While a stream beside it gets three, and is then the first to be told anything."""
    headers = {NO_BEATS_HEADER: "1"}
    with (
        httpx.Client(base_url=worker.url, timeout=30) as router,
        worker.http.stream("POST", CHAT, json=body("HANG", rid="beats")) as beats,
    ):
        worker.scheduler.may_break.clear()
        with router.stream("POST", CHAT, json=body("BREAK"), headers=headers) as silent:
            read, other = lines(silent), lines(beats)
            two = [next(read) for _ in range(2)]
            assert [next(other) for _ in range(5)] == [COMMENT] * 5
            worker.scheduler.may_break.set()
            assert COMMENT not in (*two, *read)
    worker.wait_idle()
