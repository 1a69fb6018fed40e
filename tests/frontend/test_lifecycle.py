"""Start, stop and failures of the processes around the frontend."""

import asyncio
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.frontend.client.engine_client import ClientLimits, EngineClient
from engine.frontend.client.forecast import MIN_STARTED
from engine.frontend.client.leaders import Leaders
from engine.frontend.client.scheduler_link import SchedulerLink
from engine.frontend.metrics.worker import Metrics
from engine.messages import FAKE_BOOTSTRAP_HOST, StepInfo, StepReply
from engine.text.incremental import SampleText
from service.flags import ConfigError
from service.http.errors import ApiError, draining
from service.http.heartbeats import PATH as HEARTBEATS
from tests.frontend.conftest import Worker, byte_tokenizer, start_worker, wait_for, write_checkpoint
from tests.frontend.worker_main import WorkerThread


def test_health_is_503_until_ready_and_when_the_scheduler_is_silent(tmp_path: Path) -> None:
    with start_worker(tmp_path, ready=False) as w:
        for path in ("/health", "/health_generate"):
            answer = w.http.get(path)
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert w.post("/generate", {"text": "a"}).status_code == 503
        assert w.http.get("/server_info").json()["status"] == "starting"
        assert (early := w.http.get(HEARTBEATS)).status_code == 503 and "loading" in early.text
        assert w.http.get("/v1/models").status_code == 200 and w.http.get("/metrics").status_code == 200
        w.scheduler.doing = StepReply(call_id="", busy_s=12.0, loading=True)
        answer = w.http.get("/health")
        assert answer.status_code == 503 and "loading for 12 s" in answer.text
        w.scheduler.doing = StepReply(call_id="", busy_s=None)
        w.scheduler.say_ready()
        wait_for(lambda: w.http.get("/health").status_code == 200)
        w.scheduler.silent = True
        wait_for(lambda: w.http.get("/health").status_code == 503)
        assert w.http.get("/health_generate").status_code == 503
        w.scheduler.silent = False
        assert w.http.get("/health").status_code == 200


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
def test_a_worker_is_ready_once_its_first_request_is_computed(tmp_path: Path, mode: str) -> None:
    with start_worker(tmp_path, mode=mode, ready=False, warms_up=True) as w:
        w.scheduler.busy = True
        w.scheduler.say_ready()
        wait_for(lambda: "the warm-up request is being computed" in w.http.get("/health").text)
        assert w.http.get("/health").status_code == 503 and not (tmp_path / "ready").exists()
        w.scheduler.busy = False
        wait_for(lambda: w.http.get("/health").status_code == 200)
        wait_for(lambda: (tmp_path / "ready").exists())
        (first,) = w.scheduler.seen
        assert (first.bootstrap is None) == (mode == "null")
        assert first.bootstrap is None or first.bootstrap.host == FAKE_BOOTSTRAP_HOST


def test_a_worker_whose_first_request_fails_ends_and_names_the_remedy(tmp_path: Path) -> None:
    with start_worker(tmp_path, ready=False, warms_up=True) as w:
        w.scheduler.refuses = True
        w.scheduler.say_ready()
        assert w.process.wait(60) == 1 and isinstance(w.process, WorkerThread)
        text = "the warm-up request failed (no memory for this request); --skip-server-warmup leaves it out"
        assert str(w.process.error) == text


def test_a_busy_scheduler_is_healthy_and_a_stalled_or_silent_one_is_not(tmp_path: Path) -> None:
    """In a step that lasts, `/health` says so; load and information are those from before the step."""
    step = StepInfo(seq=7, kind="prefill", num_reqs=2, num_tokens=1024)
    with start_worker(tmp_path) as w:
        wait_for(lambda: w.scheduler.num_states > 0)  # unasked, as soon as it was ready
        w.scheduler.doing = StepReply(call_id="", busy_s=90.0, step=step)
        w.scheduler.busy = True
        wait_for(lambda: "busy_s" in w.http.get("/health").json(), every_s=0.2)  # its last message is recent at first
        said = w.http.get("/health")
        assert said.status_code == 200 and said.json()["busy_s"] == 90.0
        assert said.json()["step"] == {"seq": 7, "kind": "prefill", "num_reqs": 2, "num_tokens": 1024}
        (load,) = w.http.get("/v1/loads").json()["loads"]
        assert load["num_running_reqs"] == 0 and w.http.get("/get_load").status_code == 200
        info = w.http.get("/server_info").json()
        assert (info["status"], info["busy_s"]) == ("ready", 90.0)
        assert " 90.0" in next(line for line in w.http.get("/metrics").text.splitlines() if "step_age_seconds{" in line)
        w.scheduler.doing = StepReply(call_id="", busy_s=301.0, stalled=True, step=step)
        stalled = w.http.get("/health")
        assert stalled.status_code == 503 and "--watchdog-timeout" in stalled.text
        w.scheduler.silent = True
        assert w.http.get("/health").status_code == 503


def test_a_dead_scheduler_fails_what_runs_and_ends_the_worker(tmp_path: Path) -> None:
    with start_worker(tmp_path) as w:
        with w.stream("SLOW") as last:
            (tmp_path / "dead").touch()
            assert last()["error"]["message"] == "the scheduler process died"
        assert w.process.wait(60) == 1 and isinstance(w.process, WorkerThread)
        assert str(w.process.error) == "the scheduler process died"


def test_sigterm_lets_running_requests_finish_then_fails_the_rest(tmp_path: Path) -> None:
    with start_worker(tmp_path, drain_s=0.5, process=True) as w:
        statuses: list[int] = []
        thread = threading.Thread(target=lambda: statuses.append(w.post("/generate", {"text": "SLOW"}).status_code))
        thread.start()
        wait_for(lambda: w.scheduler.num_running == 1)
        w.process.send_signal(signal.SIGTERM)
        assert w.process.wait(60) == 0
        thread.join()
        assert statuses == [503]
        wait_for(lambda: w.scheduler.num_running == 0)  # it was aborted
        assert "Traceback" not in w.log.read_text()


def test_a_draining_worker_says_so_takes_nothing_new_and_goes_on_with_what_runs(tmp_path: Path) -> None:
    """And it is the same process all the time: routers see another one at its address by its `incarnation`."""
    with start_worker(tmp_path, drain_s=60.0) as w:
        incarnation = w.http.get("/health").json()["incarnation"]
        assert len(incarnation) == 32
        w.scheduler.may_break.clear()
        with w.stream("BREAK") as last:
            w.process.send_signal(signal.SIGTERM)
            health = wait_for(lambda: (r := w.http.get("/health")).status_code == 503 and r)
            said = {"status": "draining", "num_live_reqs": 1, "incarnation": incarnation}
            assert health.json() == said and health.headers["retry-after"] == "1"
            refused = w.post("/generate", {"text": "a"})
            assert refused.headers["retry-after"] == "1" and refused.json()["error"]["code"] == "draining"
            assert w.http.get("/server_info").json()["status"] == "draining"
            assert w.process.poll() is None
            wait_for(lambda: w.scheduler.was_told_to_drain)
            w.scheduler.may_break.set()  # the request ends as it would have: with an error of its own
            assert last()["error"]["message"] == "the transfer broke"
        asked = w.scheduler.num_states
        wait_for(lambda: w.scheduler.num_states > asked + 2)  # until queues are empty, too
        assert w.http.get("/health").json() == {**said, "num_live_reqs": 0}
        w.scheduler.prealloc = 0
        assert w.process.wait(60) == 0


@pytest.mark.parametrize("sigterm", [False, True])
def test_a_switch_lets_running_requests_finish_and_sigterm_in_the_middle_ends_the_worker(
    tmp_path: Path, sigterm: bool
) -> None:
    with start_worker(tmp_path, mode="prefill", drain_s=60.0) as w:
        w.scheduler.may_break.clear()
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
        with w.stream("BREAK", **room) as last:
            assert w.post("/switch_role", {"role": "decode", "timeout": 600}).status_code == 202
            health = wait_for(lambda: (r := w.http.get("/health")).status_code == 503 and r).json()
            assert (health["status"], health["switching_to"], health["num_live_reqs"]) == ("draining", "decode", 1)
            assert w.http.get("/server_info").json()["switching_to"] == "decode"
            assert w.error("/generate", {"text": "a", **room, "bootstrap_room": 2}, 503)["code"] == "draining"
            if sigterm:
                w.process.send_signal(signal.SIGTERM)
            w.scheduler.may_break.set()
            assert last()["error"]["message"] == "the transfer broke"
        w.scheduler.prealloc = 0
        assert w.process.wait(60) == 0
        assert (tmp_path / "next").exists() is not sigterm


async def test_no_call_waits_for_an_engine_that_is_being_ended() -> None:
    """Open and new calls fail at once; routers still read that the worker drains."""
    client = EngineClient(
        Leaders([SchedulerLink(lambda message: None, time.monotonic)]),
        open_text=partial(SampleText, byte_tokenizer()),
        observer=Metrics(model_name="m", mode="decode"),
        limits=ClientLimits(max_running=1, max_queued=0),
    )
    waits = asyncio.create_task(client.leaders.states(timeout_s=5.0))
    await asyncio.sleep(0)
    client.end(draining("it changes its role"))
    for call in (waits, client.leaders.states(timeout_s=5.0)):
        with pytest.raises(ApiError, match="it changes its role"):
            await call
    assert client.is_draining


def test_a_unified_worker_has_no_role_to_change(worker: Worker) -> None:
    error = worker.error("/switch_role", {"role": "decode"})
    assert "--disaggregation-mode prefill or decode" in error["message"]
    assert worker.http.get("/health").status_code == 200


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
def test_ctrl_c_or_a_second_signal_ends_a_worker_at_once(tmp_path: Path, signals: list[signal.Signals]) -> None:
    """A request that never ends is handed back, with a word that routers understand."""
    with start_worker(tmp_path, drain_s=600.0) as w:
        with w.stream("SLOW") as last:
            w.process.send_signal(signals[0])
            for number in signals[1:]:
                wait_for(lambda: w.http.get("/health").status_code == 503)
                w.process.send_signal(number)
            assert last()["error"]["code"] == "draining"
        assert w.process.wait(60) == 0
        wait_for(lambda: w.scheduler.num_running == 0)


def test_a_request_whose_first_token_would_come_too_late_is_refused_at_once(tmp_path: Path) -> None:
    soon, late = {"x-request-timeout": "3600"}, {"x-envoy-expected-rq-timeout-ms": "0.000001"}
    with start_worker(tmp_path, server={"enable_early_rejection": True}) as w:
        assert w.post("/generate", {"text": "a"}, headers=late).status_code == 200
        for _ in range(MIN_STARTED):
            assert w.post("/generate", {"text": "a"}).status_code == 200
        completion = {"prompt": "a", "max_tokens": 2}
        for path, body in (("/generate", {"text": "a"}), ("/v1/completions", completion)):
            refused = wait_for(partial(_refusal, w, path, body, late))  # answers within a millisecond give no rate
            assert refused.json()["error"]["code"] == "deadline" and int(refused.headers["retry-after"]) >= 1
            assert w.post(path, body, headers=soon).status_code == 200
        bad = w.error("/generate", {"text": "a"}, headers={"x-request-timeout": "soon"})
        assert bad["param"] == "x-request-timeout"
        counted = 'tandem_num_early_rejections_total{engine_type="unified",model_name="tiny"} 2.0'
        assert counted in w.http.get("/metrics").text


def _refusal(w: Worker, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
    answer = w.post(path, body, headers=headers)
    return answer if answer.status_code == 503 else None


def test_without_the_flag_a_timeout_refuses_nothing(worker: Worker) -> None:
    for _ in range(MIN_STARTED + 1):
        assert worker.post("/generate", {"text": "a"}, headers={"x-request-timeout": "1e-9"}).status_code == 200


def test_broken_files_are_one_line(tmp_path: Path) -> None:
    def error() -> str:
        with pytest.raises(ConfigError) as caught, start_worker(tmp_path):
            pass
        assert "\n" not in str(caught.value)
        return str(caught.value)

    checkpoint = write_checkpoint(tmp_path / "tiny")
    (checkpoint / "chat_template.jinja").write_text("{% if %}")
    assert "syntax error" in error()
    (checkpoint / "tokenizer.json").write_text("{")
    assert "tokenizer.json" in error()
    (checkpoint / "tokenizer.json").unlink()
    assert "no tokenizer.json there; give --skip-tokenizer-init" in error()
