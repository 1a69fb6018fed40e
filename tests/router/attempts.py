"""Requests and attempts without sockets: answers are scripted by the test."""

import asyncio
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from router.attempts.pair_attempt import AttemptLauncher, PairAttempt, RoomMinter
from router.attempts.request import Events, RequestContext
from router.body import Api, parse_body
from router.choice.policies import Placement, RoutingHints
from router.client.upstream import HttpReply
from router.pool.worker import Role, Worker
from router.pool.workers import WorkerTable

EVENTS = {"content-type": "text/event-stream"}


class ScriptedReply(HttpReply):
    """A worker's answer: `answer` and `close` change it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        no_timer = SimpleNamespace(cancel=lambda: None)
        loop: Any = SimpleNamespace(time=clock, call_later=lambda *_: no_timer)
        super().__init__(loop, timeout_s=1.0)

    @property
    def closed(self) -> bool:
        return self.error is not None

    def answer(self, status: int, body: bytes = b"x", *, events: bool = False, complete: bool = True) -> None:
        self.status, self.headers = status, EVENTS if events else {}
        if body:
            self.take()
            self.feed(body)
        if complete:
            self.finish()
        else:
            self.wake()


class ScriptedUpstream:
    """Sends nothing; `sent`: (url, headers, body) of the calls, `replies`: their answers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.sent: list[tuple[str, Mapping[str, str], Any]] = []
        self.replies: list[ScriptedReply] = []
        self._clock = clock

    def post(self, url: str, path: str, *, headers: Mapping[str, str], body: bytes) -> Any:
        self.sent.append((url, headers, json.loads(body)))
        self.replies.append(ScriptedReply(self._clock))
        return self.replies[-1]


def make_request(name: str = "id", *, body: bytes = b'{"text": "hello, you", "model": "m"}', now_s: float = 0.0) -> Any:
    """A request that was read, and belongs to no connection and no task."""
    http: Any = SimpleNamespace(headers={})
    task: Any = None
    request = RequestContext(http=http, task=task, request_id=name, path="/generate", started_s=now_s, body=body)
    request.parsed = parsed = parse_body(Api.GENERATE, body)
    request.hints = RoutingHints(prompt_tokens=parsed.prompt_tokens, output_tokens=parsed.output_tokens)
    return request


class Launched:
    """Attempts of requests at workers of `table`; `events` receive theirs."""

    def __init__(self, *, events: Events | None = None, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.table = WorkerTable()
        self.upstream = ScriptedUpstream(clock)
        self.rooms = RoomMinter()
        self.launcher = AttemptLauncher(
            table=self.table,
            rooms=self.rooms,
            upstream=self.upstream,
            events=events or Events(),
            secret=b"of the cluster",
            clock=clock,
        )

    def worker(self, role: Role, url: str) -> Worker:
        """The one at this address, added if it is not in the table."""
        known = [worker for worker in self.table.workers() if worker.url == url]
        return known[0] if known else self.table.add(url, role=role)

    def pair(
        self, request: RequestContext | None = None, *, prefill: str = "http://p0", decode: str = "http://d0"
    ) -> tuple[PairAttempt, ScriptedReply, ScriptedReply]:
        """(an attempt, prefill's answer, decode's answer)."""
        workers = self.worker(Role.PREFILL, prefill), self.worker(Role.DECODE, decode)
        placements = [Placement(worker) for worker in workers]
        attempt = self.launcher.begin(request or make_request(), placements)
        first, second = self.upstream.replies[-2:]
        return attempt, first, second

    def check(self) -> None:
        """Nothing is held any more."""
        self.table.check()
        assert self.table.loads.num_leases == self.rooms.num_live == len(self.launcher.tails) == 0


async def turns(count: int = 2) -> None:
    """Let other tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)
