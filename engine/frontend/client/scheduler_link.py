"""A worker's schedulers: calls and last reports; live requests and names of its frontends."""

import asyncio
import fcntl
import hashlib
import itertools
import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from engine.frontend.client.dp_policy import RankLoad
from engine.frontend.errors import not_ready, refused
from engine.ipc import MAIN_FRONTEND, IpcPaths, PeerStalled, PullSocket, PushSocket, addressed
from engine.messages import (
    AbortRequest,
    ControlMessage,
    ControlReply,
    Drain,
    ExpectReturn,
    FlushCache,
    GenerateBatch,
    GenerateRequest,
    GetState,
    GetStep,
    MoveOut,
    SchedulerReady,
    Shutdown,
    StateReply,
    StepReply,
    ToFrontend,
    ToScheduler,
    joined,
)
from service.http.errors import ApiError, bad_field
from service.process.files import mapped

# ---- Calls to the scheduler process and its last reports, in one event loop.

R = TypeVar("R", StateReply, StepReply, ControlReply)
Reply = StateReply | StepReply | ControlReply

ENGINE_DEAD = "engine_dead"  # error code
MAX_CALLS = 1024  # open calls
FIRST_STATE = "s0"
CALL_TIMEOUT_S = 20.0  # a scheduler in a long step replies after it
PATIENCE_S = 0.5  # then its last report counts; below --health-silence


def concerns_requests(reply: ControlReply) -> bool:
    """True if the reply changes later requests: weights or adapters."""
    return "weight_version" in reply.values or reply.adapters is not None


class SchedulerLink:
    """`send` queues a message, or raises ApiError(503). `row`: this frontend's. Only the main
    frontend makes calls.
    """

    def __init__(
        self,
        send: Callable[[ToScheduler | GetStep], None],
        now_s: Callable[[], float],
        *,
        row: int = MAIN_FRONTEND,
    ) -> None:
        self.now_s = now_s
        self.info: dict[str, int | float | str | bool | list[int] | None] = {}
        self.ready = asyncio.Event()
        self.last_message_s = float("-inf")  # of the scheduler's loop
        self.last_state: StateReply | None = None
        self.updated: dict[str, int | str] = {}  # model_path, weight_version, weight_source after an update
        self.released: set[str] = set()  # parts of memory
        self.paused = ""  # mode of the pause
        self.adapters: dict[str, str] = {}  # name -> path of loaded adapters
        self._numbers = itertools.count(1)  # for unique wire names
        self._row = row
        self.gone: ApiError | None = None  # why calls fail
        self._send = send
        self._calls: dict[str, asyncio.Future[Reply]] = {}

    async def state(self, *, check: bool = False, timeout_s: float = CALL_TIMEOUT_S) -> StateReply:
        """Raises ApiError(503) on timeout."""
        return await self._call(GetState(call_id=f"s{next(self._numbers)}", check=check), StateReply, timeout_s)

    async def step(self, *, timeout_s: float = CALL_TIMEOUT_S) -> StepReply:
        """The current step, from the heartbeat thread. Raises ApiError(503)."""
        return await self._call(GetStep(call_id=f"b{next(self._numbers)}"), StepReply, timeout_s)

    async def recent_state(self, *, timeout_s: float = CALL_TIMEOUT_S, closed: bool = False) -> StateReply:
        """The state, an earlier one during a long step. Raises ApiError(503)."""
        try:
            return await self.state(timeout_s=PATIENCE_S)
        except ApiError:
            if closed or self.last_state is None:
                return await self.state(timeout_s=timeout_s)
            if (await self.step(timeout_s=timeout_s)).stalled:
                raise
            return self.last_state

    async def flush_cache(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ControlReply:
        return await self._call(FlushCache(call_id=f"f{next(self._numbers)}"), ControlReply, timeout_s)

    async def control(self, message: ControlMessage, *, timeout_s: float | None = CALL_TIMEOUT_S) -> ControlReply:
        """Raises ApiError: the scheduler's rejection, or 503 on timeout (None: no limit)."""
        reply = await self._call(message, ControlReply, timeout_s)
        if not reply.ok:
            raise refused(reply)
        return reply

    def mint_call_id(self) -> str:
        return f"c{next(self._numbers)}"

    def mint_wire_rid(self, name: str) -> str:
        """Unique in this worker, replied to this frontend."""
        return addressed(f"{name}:{next(self._numbers):x}", self._row)

    def send(self, message: GenerateRequest | GenerateBatch | AbortRequest | MoveOut | ExpectReturn) -> None:
        """Raises ApiError(503) if the scheduler is stuck."""
        self._send(message)

    def abort(self, wire_rid: str) -> None:
        """Skip a dead process."""
        if self.gone is None or self.gone.code != ENGINE_DEAD:
            with suppress(ApiError):
                self._send(AbortRequest(rid=wire_rid))

    def announce_drain(self) -> None:
        with suppress(ApiError):
            self._send(Drain())

    def fail_calls(self, error: ApiError, *, gone: bool) -> None:
        """Fail open calls; `gone`: later ones, too."""
        if gone:
            self.gone = error
        for call in list(self._calls.values()):
            if not call.done():
                call.set_exception(error)

    def on_message(self, message: SchedulerReady | Reply) -> None:
        if isinstance(message, SchedulerReady):
            self.info = message.info
            self.ready.set()
            if self._row != MAIN_FRONTEND:
                return
            with suppress(ApiError):  # before any request, so that the first long step has a `last_state`
                self._send(GetState(call_id=FIRST_STATE))
            return
        if isinstance(message, StateReply):
            self.last_state = message
        if isinstance(message, ControlReply) and "weight_version" in message.values:
            self.updated = message.values  # even if the caller left
        if isinstance(message, ControlReply) and (released := message.values.get("released")) is not None:
            self.released = set(str(released).split(",")) - {""}
        if isinstance(message, ControlReply) and (paused := message.values.get("paused")) is not None:
            self.paused = str(paused)
        if isinstance(message, ControlReply) and message.adapters is not None:
            self.adapters = message.adapters
        call = self._calls.get(message.call_id)
        if call is not None and not call.done():
            call.set_result(message)

    async def _call(
        self, message: GetState | GetStep | FlushCache | ControlMessage, reply: type[R], timeout_s: float | None
    ) -> R:
        if self.gone is not None:
            raise self.gone
        if len(self._calls) >= MAX_CALLS:
            text = f"{len(self._calls)} calls to the scheduler are open"
            raise ApiError(503, text, code="queue_full", retry_after_s=1)
        call: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[message.call_id] = call
        try:
            self._send(message)
            answer = await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise not_ready(f"the scheduler did not answer within {timeout_s or 0:g} s") from None
        finally:
            del self._calls[message.call_id]
        assert isinstance(answer, reply)
        return answer


# ---- A frontend's sockets to a DP rank's scheduler and heartbeat, and back.

Send = Callable[[ToScheduler | GetStep], None]


@contextmanager
def open_sockets(ipc: IpcPaths, *, row: int = MAIN_FRONTEND) -> Iterator[tuple[Send, PullSocket[ToFrontend]]]:
    """`send` raises ApiError(503). Closing the main frontend's sockets sends `Shutdown`."""
    push, heartbeat = PushSocket(ipc.to_scheduler), PushSocket(ipc.to_heartbeat)
    pull: PullSocket[ToFrontend] = PullSocket(ipc.to_frontend_of(row), ToFrontend, join=joined)

    def send(message: ToScheduler | GetStep) -> None:
        try:
            (heartbeat if isinstance(message, GetStep) else push).send(message)
        except PeerStalled as e:
            raise ApiError(503, str(e), code="engine_stalled", retry_after_s=1) from None

    try:
        yield send, pull
    finally:
        if row == MAIN_FRONTEND:
            with suppress(PeerStalled):
                push.send(Shutdown())
        for socket in (push, heartbeat, pull):
            socket.close()


# ---- Live requests over a worker's frontends: counts and tokens per DP rank, names.
#
# A count is a cell of shared memory with one writer. A name is a locked byte of a file, at its
# hash, so the kernel releases it with its process.


class SharedRequests:
    """Open it once per process: closing any descriptor of the file drops all locks."""

    def __init__(self, folder: str, *, row: int, num_rows: int, num_ranks: int = 1) -> None:
        self._row = row
        self._num_ranks = num_ranks
        # by row, then rank: requests, tokens
        self._counts = mapped(f"{folder}/live", 2 * 8 * num_rows * num_ranks)
        self._names = os.open(f"{folder}/names", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def num_live(self) -> int:
        """Concurrent starts may not count each other."""
        return sum(self._counts[::2])

    def loads(self) -> list[RankLoad]:
        counts, step = self._counts.tolist(), 2 * self._num_ranks
        return [RankLoad(sum(counts[2 * r :: step]), sum(counts[2 * r + 1 :: step])) for r in range(self._num_ranks)]

    def publish(self, num_live: int, *, rank: int = 0, num_tokens: int = 0) -> None:
        place = 2 * (self._row * self._num_ranks + rank)
        self._counts[place], self._counts[place + 1] = num_live, num_tokens

    def claim(self, name: str) -> bool:
        try:
            fcntl.lockf(self._names, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(name))
        except BlockingIOError:
            return False
        return True

    def release(self, name: str) -> None:
        fcntl.lockf(self._names, fcntl.LOCK_UN, 1, _place(name))

    def close(self) -> None:
        os.close(self._names)


def _place(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8]) >> 2


class RankLoads:
    """`shared`: with other frontends, if any."""

    def __init__(self, num_ranks: int, shared: SharedRequests | None) -> None:
        self._own = [RankLoad() for _ in range(num_ranks)]
        self._shared = shared

    @property
    def num_live(self) -> int:
        return sum(load.requests for load in self._own) if self._shared is None else self._shared.num_live

    def of_all(self) -> list[RankLoad]:
        return self._own if self._shared is None else self._shared.loads()

    def change(self, rank: int, *, requests: int = 0, tokens: int = 0) -> None:
        load = self._own[rank]
        load.requests += requests
        load.tokens += tokens
        if self._shared is not None:
            self._shared.publish(load.requests, rank=rank, num_tokens=load.tokens)


# ---- Users' names of live samples and groups, unique over a worker's frontends.

MAX_RID_CHARS = 256


class Name(NamedTuple):
    """`owner`: empty without key."""

    owner: str
    text: str


class LiveNames:
    """`shared`: with other frontends, if any."""

    def __init__(self, shared: SharedRequests | None) -> None:
        self._shared = shared
        self._rids: dict[Name, list[str]] = {}  # wire names

    def check(self, samples: Sequence[Name], groups: Iterable[Name]) -> None:
        """Raises ApiError(400) for a duplicate, invalid or used name."""
        if len(set(samples)) < len(samples):
            raise bad_field("rid", "the same id is given twice")
        for name in sorted({*samples, *groups}):
            if not 0 < len(name.text) <= MAX_RID_CHARS:
                raise bad_field("rid", f"must have 1 to {MAX_RID_CHARS} characters")
            if name in self._rids:
                raise _in_use(name)

    def claim(self, names: Iterable[Name]) -> None:
        """Claim all names over frontends, or none. Raises ApiError(400)."""
        if self._shared is None:
            return
        claimed: list[Name] = []
        for name in set(names):
            if not self._shared.claim(_in_file(name)):
                for taken in claimed:
                    self._shared.release(_in_file(taken))
                raise _in_use(name)
            claimed.append(name)

    def add(self, name: Name, wire_rid: str) -> None:
        self._rids.setdefault(name, []).append(wire_rid)

    def of(self, text: str, owner: str | None) -> Sequence[str]:
        """Wire names. `owner` None: any."""
        if owner is not None:
            return self._rids.get(Name(owner, text), ())
        return [rid for name, rids in self._rids.items() if name.text == text for rid in rids]

    def leave(self, name: Name, gone: Container[str]) -> None:
        """Remove the samples `gone`; the last one frees the name."""
        left = [rid for rid in self._rids.get(name, ()) if rid not in gone]
        if left:
            self._rids[name] = left
            return
        self._rids.pop(name, None)
        if self._shared is not None:
            self._shared.release(_in_file(name))


def _in_file(name: Name) -> str:
    return "/".join(name)


def _in_use(name: Name) -> ApiError:
    return bad_field("rid", f"a request with id {name.text!r} is running")
