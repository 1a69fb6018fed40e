"""The servers of the tests of hostile input: a cluster with two router processes, a router of one, a unified worker."""

import asyncio
import contextlib
import http.client
import json
import random
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx

from tests.e2e.client import assert_all_back, generate_all
from tests.e2e.cluster import SHIPPED, Cluster, cluster, tandem
from tests.e2e.workload import recall_body
from tests.frontend.conftest import Worker, start_worker
from tests.hostile import means
from tests.hostile.table import Call
from tools.family import family

ANSWER_S = 60.0
AT_A_TIME = 8
ROUTERS, WORKERS = ("router", "fleet"), ("unified", "prefill", "decode")
SERVERS = (*ROUTERS, *WORKERS, "bootstrap")


@dataclass(frozen=True)
class Answer:
    """`status` 0: the connection was closed instead."""

    status: int
    body: bytes


@dataclass(frozen=True)
class Doors:
    """Base URLs by name of the server. `alone`: the unified worker, with a stand-in for its scheduler."""

    cluster: Cluster
    alone: Worker
    urls: Mapping[str, str]
    http: httpx.Client

    def play(self, door: str, cases: Mapping[str, Call]) -> dict[str, Answer]:
        """What each case is answered, several at a time."""
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            return dict(zip(cases, pool.map(lambda call: ask(self.urls[door], call), cases.values()), strict=True))

    def serve_well(self, count: int = 2) -> None:
        """Right answers cross the cluster, and all memory is back."""
        rng = random.Random(1)
        drawn = [recall_body(rng, rng.randint(5, 60), max_new_tokens=3) for _ in range(count)]
        answers = asyncio.run(generate_all(self.urls["fleet"], [body for body, _ in drawn]))
        assert [answer["output_ids"] for answer in answers] == [wanted for _, wanted in drawn]
        asyncio.run(assert_all_back(self.cluster))


def ask(url: str, call: Call) -> Answer:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=ANSWER_S) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            sock.sendall(call.head(parts.netloc.encode()))
        response = http.client.HTTPResponse(sock, method=call.method.decode("latin-1"))
        try:
            response.begin()
            return Answer(response.status, response.read())
        except (http.client.HTTPException, ConnectionResetError):
            return Answer(0, b"")


@contextlib.contextmanager
def start_doors(folder: Path) -> Iterator[Doors]:
    """At the end every process still runs, all memory is back, and no log has a traceback of ours."""
    args = ("--run-dir", str(folder / "logs"), "--workers", "2", "--stream", "threaded", *SHIPPED)
    with contextlib.ExitStack() as stack:
        c = stack.enter_context(cluster(folder, "--transfer-backend", "nixl", *args))
        urls = {role: c.of(role)[0].url for role in ("prefill", "decode")}
        pd = ("--pd-disaggregation", "--prefill", urls["prefill"], "--decode", urls["decode"])
        policies = ("--prefill-policy", "cache_aware", "--decode-policy", "consistent_hashing")
        router = stack.enter_context(tandem(folder / "router", "router", "--port", "0", *pd, *policies))
        unified = stack.enter_context(start_worker(folder, process=True))
        urls |= {"router": router.url, "fleet": c.router, "unified": unified.url, "bootstrap": means.bootstrap_url(c)}
        members = family(c.launcher.pid)[1:]
        yield Doors(c, unified, urls, stack.enter_context(httpx.Client(timeout=ANSWER_S)))
        asyncio.run(assert_all_back(c))
        assert all(process.poll() is None for process in (router.process, unified.process))
        assert all(process.is_running() for process in members)
        for log in (*(folder / "logs").iterdir(), router.log, unified.log):
            assert (found := means.our_traceback(log)) is None, found


def wrong(answers: Mapping[str, Answer], is_fine: Callable[[Answer], bool]) -> dict[str, tuple[int, bytes]]:
    """The answers that are not as they should be, by name of the case."""
    return {name: (a.status, a.body[:300]) for name, a in answers.items() if not is_fine(a)}


def is_refusal(answer: Answer) -> bool:
    """4xx, and JSON that says why: an error, or what each of several workers answered."""
    try:
        said = json.loads(answer.body)
    except ValueError:
        return False
    return 400 <= answer.status < 500 and isinstance(said, dict) and bool(said.get("error") or said.get("workers"))


def is_no_failure(answer: Answer) -> bool:
    """An answer; where it is a refusal, JSON that says why."""
    return 200 <= answer.status < 400 or is_refusal(answer)


def names_field(answer: Answer, field: str) -> bool:
    """A 400 in its API's shape that names `field` in its message, in OpenAI's shape also as its parameter."""
    if answer.status != 400:
        return False
    said = json.loads(answer.body)
    error = said["error"]
    if isinstance(error, str):
        return field in error
    if said.get("type") == "error":
        return error["type"] == "invalid_request_error" and field in error["message"]
    in_shape = set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return in_shape and error["param"] == field and field.split(".")[-1].split("[")[0] in error["message"]
