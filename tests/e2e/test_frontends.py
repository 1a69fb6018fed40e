"""Several frontend processes of one worker (--tokenizer-worker-num 2): wherever a connection lands, the answer is the same."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.e2e.cluster import DEAD, Cluster, Started, Worker, child_of, cluster, tandem, wait_until
from tests.e2e.settings import settings
from tests.lora.tiny_adapters import make_tiny_adapter
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tools.family import lives

TWO = ("--tokenizer-worker-num", "2")
COMMON = ("--max-total-tokens", "16384", "--stream", "threaded")
LIMITS = ("--max-running-requests", "4", "--max-queued-requests", "4")
MAX_LIVE = 8
TRIES = 64  # of connections, until one lands where it should
ENDED_S = 60.0
LONG = 400  # tokens of a stream that is still running when the test looks
KEY = "old-key"
SERVED = ("unified INFO POST /generate 200", "unified frontend 1 INFO POST /generate 200")
NO_TRANSFER = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 7}


@dataclass(frozen=True)
class Frontends:
    """A connection to each frontend of one worker, by its row."""

    connections: tuple[HTTPConnection, ...]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.connections)))

    def open(self, row: int, method: str, path: str, body: Any = None, key: str = KEY) -> HTTPResponse:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", "X-Request-Id": f"by-{row}"}
        self.connections[row].request(method, path, None if body is None else json.dumps(body), headers)
        return self.connections[row].getresponse()

    def call(self, row: int, method: str, path: str, body: Any = None, key: str = KEY) -> tuple[int, Any]:
        response = self.open(row, method, path, body, key)
        text = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(text) if is_json else text.decode()

    def generate(self, row: int, **fields: Any) -> tuple[int, Any]:
        return self.call(row, "POST", "/generate", body(**fields))

    @contextmanager
    def stream(self, row: int, **fields: Any) -> Iterator[Iterator[Any]]:
        """Events of a stream that has begun, to be read to the end."""
        response = self.open(row, "POST", "/generate", body(stream=True, new=LONG, **fields))
        events = (json.loads(line[6:]) for line in response if line.startswith(b"data: {"))
        assert "error" not in next(events)
        yield events
        response.read()


def body(*, new: int = 8, n: int = 1, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True, "n": n}
    return {"input_ids": list(range(20, 90)), "sampling_params": sampling, **fields}


@contextmanager
def frontends(url: str, pid: int) -> Iterator[Frontends]:
    """Connections to the main frontend, of process `pid`, and to the other one."""
    address = urlsplit(url)
    pids = (pid, child_of(pid, "frontend_process").pid)
    found: dict[int, HTTPConnection] = {}
    with ExitStack() as stack:
        for _ in range(TRIES):
            connection = stack.enter_context(closing(HTTPConnection(address.hostname or "", address.port, timeout=60)))
            connection.request("GET", "/liveness")
            assert connection.getresponse().read() == b'{"status":"alive"}'
            port = connection.sock.getsockname()[1]
            (owner,) = [p for p in pids if any(c.raddr and c.raddr.port == port for c in sockets_of(p))]
            found.setdefault(owner, connection)
            if len(found) == len(pids):
                yield Frontends(tuple(found[p] for p in pids))
                return
    raise AssertionError(f"{TRIES} connections landed at {len(found)} frontend")


def sockets_of(pid: int) -> list[Any]:
    return psutil.Process(pid).net_connections("tcp")


@dataclass(frozen=True)
class Unified:
    worker: Started
    keys: Path
    checkpoint: str
    adapter: str


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Unified, Cluster]]:
    """A unified worker, and a pair, started at the same time. The last tests end them."""
    folder = tmp_path_factory.mktemp("frontends")
    checkpoint = make_tiny_checkpoint(folder / "qwen3", "qwen3")
    adapter = make_tiny_adapter(folder / "adapter", checkpoint, seed=1)
    (keys := folder / "keys").write_text(KEY)
    keys.chmod(0o600)
    flags, env = (*TWO, *COMMON, "--model-path", checkpoint), settings(stream_delay_s=0.004)
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        serve = ("serve", "--port", "0", *flags, *LIMITS, "--enable-lora", "--api-key-file", str(keys))
        alone = threads.submit(stack.enter_context, tandem(folder / "alone", *serve, env=env))
        args = ("--transfer-backend", "nixl", "--run-dir", str(folder / "two" / "logs"), *flags, DEAD)
        two = threads.submit(stack.enter_context, cluster(folder / "two", *args, env=env))
        yield Unified(alone.result(), keys, checkpoint, adapter), two.result()


@pytest.fixture
def unified(started: tuple[Unified, Cluster]) -> Unified:
    return started[0]


@pytest.fixture
def at(unified: Unified) -> Iterator[Frontends]:
    with frontends(unified.worker.url, unified.worker.process.pid) as found:
        yield found


def test_tokens_are_the_same_through_every_frontend(at: Frontends, started: tuple[Unified, Cluster]) -> None:
    """Also of a pair, each half through each of its frontends."""
    answers = [at.generate(row, rid=f"same-{row}") for row in at]
    assert [status for status, _ in answers] == [200, 200]
    unified_log = started[0].worker.log
    wait_until(
        lambda: all(line in unified_log.read_text() for line in SERVED), within_s=ENDED_S, what="each served one"
    )
    tokens = [answer["output_ids"] for _, answer in answers]
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        (prefill,), (decode,) = (started[1].of(role) for role in ("prefill", "decode"))
        at_prefill = stack.enter_context(frontends(prefill.url, prefill.pid))
        at_decode = stack.enter_context(frontends(decode.url, decode.pid))
        _, info = at_prefill.call(0, "GET", "/server_info")
        for room, (row_p, row_d) in enumerate(((p, d) for p in at_prefill for d in at_decode), start=1):
            port = info["disaggregation_bootstrap_port"]
            where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
            half = threads.submit(at_prefill.generate, row_p, **where)
            status, answer = at_decode.generate(row_d, **where)
            assert (half.result()[0], status) == (200, 200), (half.result(), answer)
            tokens.append(answer["output_ids"])
    assert len(tokens) == 6 and len(set(map(tuple, tokens))) == 1, tokens


@pytest.mark.parametrize("owner", [0, 1])
def test_a_name_is_one_name_and_any_frontend_aborts_it(at: Frontends, owner: int) -> None:
    with at.stream(owner, rid="mine") as events:
        status, refused = at.generate(1 - owner, rid="mine")
        assert (status, refused["error"]["param"]) == (400, "rid") and "'mine' is running" in refused["error"][
            "message"
        ]
        assert at.call(1 - owner, "POST", "/abort_request", {"rid": "mine"})[0] == 200
        assert list(events)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert at.generate(1 - owner, rid="mine")[0] == 200
    assert at.generate(owner, rid="mine")[0] == 200


def test_the_bound_of_live_requests_holds_over_all(at: Frontends) -> None:
    with at.stream(1, rid="many", n=MAX_LIVE) as events:
        status, refused = at.generate(0)
        assert (status, refused["error"]["code"]) == (503, "queue_full")
        assert at.call(0, "GET", "/v1/loads")[1]["loads"][0]["num_live_reqs"] == MAX_LIVE
        assert at.call(0, "POST", "/abort_request", {"abort_all": True})[0] == 200
        assert list(events)
    # The other frontend counts them until it has written the end of their stream: a moment after the client read it.
    wait_until(lambda: at.generate(0)[0] == 200, within_s=ENDED_S, what="the queue has room again")


def test_metrics_and_traces_are_those_of_all(at: Frontends) -> None:
    def counts(row: int) -> tuple[float, float]:
        lines = at.call(row, "GET", "/metrics")[1].splitlines()
        names = ("sglang:num_requests_total{", "sglang:generation_tokens_total{")
        found = [float(line.split()[-1]) for name in names for line in lines if line.startswith(name)]
        assert len([line for line in lines if line.startswith("sglang:max_total_num_tokens{")]) == 1
        return found[0], found[1]

    before = counts(0)
    for row in at:
        assert at.generate(row, new=5)[0] == 200
    after = [counts(row) for row in at]
    assert after == [(before[0] + 2, before[1] + 10)] * 2
    for row in at:
        records = at.call(row, "POST", "/traces", {"ids": ["by-0", "by-1"]})[1]["records"]
        assert {record["request_id"] for record in records} == {"by-0", "by-1"}
        assert len(at.call(row, "POST", "/traces", {"last": 1})[1]["records"]) >= 1


def test_adapters_and_weights_change_for_all_at_once(at: Frontends, unified: Unified) -> None:
    plain = at.generate(0)[1]["output_ids"]
    for row in at:
        name = f"one-{row}"
        load = {"lora_name": name, "lora_path": unified.adapter}
        assert at.call(row, "POST", "/load_lora_adapter", load)[0] == 200
        answers = [at.generate(r, lora_path=name) for r in (1 - row, row)]
        assert [status for status, _ in answers] == [200, 200], answers
        assert answers[0][1]["output_ids"] == answers[1][1]["output_ids"] != plain
        assert name in [card["id"] for card in at.call(1 - row, "GET", "/v1/models")[1]["data"]]
        assert at.call(row, "POST", "/unload_lora_adapter", {"lora_name": name})[0] == 200
        assert [at.generate(r, lora_path=name)[0] for r in (1 - row, row)] == [400, 400]
        update = {"model_path": unified.checkpoint, "weight_version": f"v{row}"}
        assert at.call(row, "POST", "/update_weights_from_disk", update)[0] == 200
        assert [at.generate(r)[1]["meta_info"]["weight_version"] for r in at] == [f"v{row}"] * 2


def test_a_stored_response_is_found_from_everywhere(at: Frontends) -> None:
    three = {"max_output_tokens": 3, "ignore_eos": True}
    status, first = at.call(1, "POST", "/v1/responses", {"input": "abc", **three})
    assert status == 200, first
    more = {"input": "d", "previous_response_id": first["id"], **three, "stream": True}
    for row in at:
        assert at.call(row, "GET", f"/v1/responses/{first['id']}")[1]["id"] == first["id"]
        status, events = at.call(row, "POST", "/v1/responses", more)
        assert status == 200 and "response.incomplete" in events


@pytest.mark.parametrize(
    "head",
    [
        b"OPTIONS * HTTP/1.1\r\nHost: a",
        b"GET http://127.0.0.1/health HTTP/1.1\r\nHost: a",
        b"HEAD /health HTTP/1.1\r\nHost: 127.0.0.1",
        b"DELETE /health HTTP/1.1\r\nHost: 127.0.0.1",
        b"POST /pause_generation HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n{",
        b"GET /no%2Fthing?a=%00&b=/ HTTP/1.1\r\nHost: 127.0.0.1",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket",
    ],
)
def test_odd_requests_are_answered_alike(at: Frontends, head: bytes) -> None:
    """What is forwarded says what the main frontend says itself."""
    answers = []
    for row in at:
        sock = at.connections[row].sock
        sock.sendall(head + b"\r\n\r\n" if b"Content-Length" not in head else head)
        response = HTTPResponse(sock, method=head.split()[0].decode())
        response.begin()
        answers.append((response.status, response.headers.get_content_type(), response.read()))
    assert answers[0] == answers[1]


def test_a_hangup_reads_keys_in_all(at: Frontends, unified: Unified) -> None:
    def change(key: str) -> None:
        """As long and as old as before, so that no process reads it by itself."""
        before = unified.keys.stat()
        unified.keys.write_text(key)
        os.utime(unified.keys, ns=(before.st_atime_ns, before.st_mtime_ns))
        unified.worker.process.send_signal(signal.SIGHUP)

    def takes(key: str) -> list[int]:
        return [at.call(row, "POST", "/tokenize", {"prompt": "a"}, key)[0] for row in at]

    change("new-key")
    wait_until(lambda: takes(KEY) == [401, 401], within_s=ENDED_S, what="both refuse the old key")
    assert takes("new-key") == [200, 200]
    change(KEY)
    wait_until(lambda: takes(KEY) == [200, 200], within_s=ENDED_S, what="as before")


def test_a_role_switch_takes_all_along_and_the_death_of_one_ends_the_worker(started: tuple[Unified, Cluster]) -> None:
    (worker,) = started[1].of("prefill")
    with frontends(worker.url, worker.pid) as at:
        first = at.call(1, "GET", "/health")[1]["incarnation"]
        assert at.call(1, "POST", "/switch_role", {"role": "decode"})[0] == 202
    address = urlsplit(worker.url)

    def has_switched() -> bool:
        with closing(HTTPConnection(address.hostname or "", address.port, timeout=60)) as http:
            http.request("GET", "/health")
            response = http.getresponse()
            return response.status == 200 and json.loads(response.read())["incarnation"] != first

    wait_until(has_switched, within_s=ENDED_S, what=started[1].log.read_text)
    with frontends(worker.url, worker.pid) as at:
        for row in at:
            assert at.generate(row, **NO_TRANSFER)[0] == 200
            assert at.call(row, "GET", "/server_info")[1]["disaggregation_mode"] == "decode"
    dies_with(started[1], worker, "frontend_process", client_of=0, why="the frontend 1 process ended (status -9)")


def test_clients_of_all_hear_that_the_scheduler_died(started: tuple[Unified, Cluster]) -> None:
    (worker,) = started[1].of("decode")
    dies_with(started[1], worker, "scheduler_process", client_of=1, why="the scheduler process ended (status -9)")


def dies_with(pair: Cluster, worker: Worker, process: str, *, client_of: int, why: str) -> None:
    """Kill a process of a decode worker: a stream of the frontend `client_of` ends with the cause, and so does the worker."""
    main = psutil.Process(worker.pid)
    with frontends(worker.url, worker.pid) as at, at.stream(client_of, **NO_TRANSFER) as events:
        child_of(worker.pid, process).kill()
        error = list(events)[-1]["error"]
        assert (error["code"], error["message"]) == ("engine_dead", why)
    wait_until(lambda: not lives(main), within_s=ENDED_S, what="it ends")
    logs = "".join(log.read_text() for log in (pair.log.parent / "logs").glob(f"{worker.role}*"))
    assert f"tandem serve: error: {why}" in logs


def test_a_drain_lets_requests_of_all_end(at: Frontends, unified: Unified) -> None:
    """The last test: it ends the worker, by a signal to the whole group, as a shell sends it to a job."""
    address = urlsplit(unified.worker.url)
    new = Frontends((HTTPConnection(address.hostname or "", address.port, timeout=60),))
    with frontends(unified.worker.url, unified.worker.process.pid) as more, at.stream(1, rid="last") as events:
        os.killpg(unified.worker.process.pid, signal.SIGTERM)
        wait_until(lambda: at.call(0, "GET", "/health")[0] == 503, within_s=ENDED_S, what="it drains")
        with closing(new.connections[0]):
            for status, refused in (new.generate(0), *(more.generate(row) for row in more)):
                assert (status, refused["error"]["code"]) == (503, "draining")
        last = list(events)[-1]["meta_info"]
        assert (last["finish_reason"]["type"], last["completion_tokens"]) == ("length", LONG)
    assert unified.worker.process.wait(ENDED_S) == 0
    assert "Traceback" not in unified.worker.log.read_text()
