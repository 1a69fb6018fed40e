"""The leader's side of its followers: messages, answers and waiting.

A follower that ends, fails or reads no messages is reported once, by name, and ends the group.
"""

import contextlib
import selectors
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from engine.core.plan import Plan, StepResult
from engine.ranks.messages import (
    NO_LIMIT,
    Apply,
    Channel,
    Done,
    Failed,
    Loaded,
    PoolSize,
    Prepare,
    Ready,
    Serving,
    Step,
    ToFollower,
    ToLeader,
    step_of,
)
from service.flags import ConfigError
from service.process.message_stream import ChannelClosed, ChannelFull

# ---- Answers of a group's followers, and the first one's end. Pure.


class EndOfGroup(NamedTuple):
    """Reason for the end, with the rank; `refused`: a wrong flag or file."""

    text: str
    refused: bool


def is_proven(plan: Plan, *, copies_beside: bool = False) -> bool:
    """True if the result of `plan`, or a later one, proves that every rank ran it.

    Each sum of a forward needs all ranks, on GPUs after writing the layer's KV. Copies without a
    forward, or parallel to it (`copies_beside`), need no sum, and a transfer peer may write those
    pages next, so followers answer such steps.
    """
    return not plan.copies_pages or (bool(plan.items) and not copies_beside)


class Answers:
    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        self.end: EndOfGroup | None = None
        self._by_key: dict[Hashable, dict[int, Any]] = {}  # by answered message: rank -> answer
        self._calls: dict[Hashable, Callable[[], None]] = {}  # due when all have answered
        self._number = 0

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def take(self, rank: int, message: ToLeader) -> None:
        """Record a message; Ready and Serving answer their types, `Done` its number."""
        if isinstance(message, Failed):
            self.note_end(f"{self.names[rank]}: {message.text}", refused=message.refused)
            return
        key = message.number if isinstance(message, Done) else type(message)
        self._by_key.setdefault(key, {})[rank] = message

    def note_end(self, text: str, *, refused: bool = False) -> None:
        """The first one counts."""
        if self.end is None:
            self.end = EndOfGroup(text, refused)

    def has_all(self, key: Hashable) -> bool:
        return len(self._by_key.get(key, ())) == len(self.names)

    def when_all(self, key: Hashable, call: Callable[[], None]) -> None:
        self._calls[key] = call

    def take_calls(self) -> list[Callable[[], None]]:
        return [self._calls.pop(key) for key in list(self._calls) if self.has_all(key)]

    def pop(self, key: Hashable) -> dict[int, Any]:
        return self._by_key.pop(key, {})

    def missing(self, key: Hashable) -> str:
        there = self._by_key.get(key, {})
        return ", ".join(name for rank, name in self.names.items() if rank not in there)


# ---- Leader's receiver thread for all followers' sockets.

# (rank, message or None at its end) -> False to stop
Take = Callable[[int, ToLeader | None], bool]


class Mail(Protocol):
    def start(self, take: Take, tick: Callable[[], None]) -> None: ...

    def wait_for(self, there: Callable[[], bool], timeout_s: float | None) -> bool: ...

    def notify(self) -> None:
        """Let waiting threads check again."""

    def close(self) -> None: ...


class ReceiverThread:
    """Thread over `channels`; `every_s` bounds the time between ticks."""

    def __init__(self, channels: Mapping[int, Channel[ToLeader]], *, every_s: float | None) -> None:
        self._channels = channels
        self._every_s = every_s
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, take: Take, tick: Callable[[], None]) -> None:
        if not self._channels:
            return
        self._thread = threading.Thread(target=self._read_all, args=(take, tick), name="followers", daemon=True)
        self._thread.start()

    def wait_for(self, there: Callable[[], bool], timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(there, timeout_s)

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._thread.join()

    def _read_all(self, take: Take, tick: Callable[[], None]) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            while not self._closed:
                for key, _ in selector.select(self._every_s):
                    if not self._read(key.data, take):
                        return
                tick()

    def _read(self, rank: int, take: Take) -> bool:
        message: ToLeader | None
        try:
            message = self._channels[rank].receive()
        except ChannelClosed:
            message = None
        wanted = take(rank, message)
        self.notify()
        return wanted


REQUESTS_PER_LIMIT = 4
STEPS_AHEAD = 2.0  # it queues after steps, each up to the limit


class LivenessProbe:
    """`limit_s`: longest step, 0 or less disables.

    Liveness probe of followers: a group ends if one does not answer. The watchdog finds ranks that
    hang in a step; an idle decode worker would not miss one otherwise.
    """

    def __init__(self, limit_s: float) -> None:
        self.every_s = limit_s / REQUESTS_PER_LIMIT if limit_s > 0 else None
        self._longest_s = STEPS_AHEAD * limit_s
        self._asked_at_s: float | None = None
        self._waiting = False

    def due(self, now_s: float) -> bool:
        if self.every_s is None or self._waiting or now_s - (self._asked_at_s or 0.0) < self.every_s:
            return False
        self._asked_at_s, self._waiting = now_s, True
        return True

    def answered(self) -> None:
        self._waiting = False

    def late_s(self, now_s: float) -> float | None:
        """Age of an overdue answer."""
        if not self._waiting or self._asked_at_s is None or now_s - self._asked_at_s <= self._longest_s:
            return None
        return now_s - self._asked_at_s


class Process(NamedTuple):
    """A follower's process, for error messages."""

    name: str  # such as "rank 2 of 4 (pid 4711)"
    ended: Callable[[], str]  # its end, such as "ended: SIGKILL"


Member = tuple[Channel[ToLeader], Process]


class GroupEnded(RuntimeError):
    """Named end of a follower, with its reason."""


# (what to print, whether the operator caused it): from the reading thread, or the thread that sends
OnEnd = Callable[[str, bool], None]


class Followers:
    """`members` by rank. `on_end` is called once, and ends the process or its loop.

    `limit_s`: longest step, 0 is unlimited; serving followers without answers for about twice as
    long have ended. `mail` delivers their messages (default: a thread). `copies_beside`: see
    `is_proven`. `num_first`: ranks of the first stage, which get images.
    """

    def __init__(
        self,
        members: Mapping[int, Member],
        *,
        on_end: OnEnd,
        limit_s: float = 0.0,
        mail: Mail | None = None,
        copies_beside: bool = False,
        num_first: int = NO_LIMIT,
    ) -> None:
        self._channels = {rank: channel for rank, (channel, _) in members.items()}
        self._processes = {rank: process for rank, (_, process) in members.items()}
        self.answers = Answers({rank: process.name for rank, process in self._processes.items()})
        self._on_end = on_end
        self._lock = threading.Lock()
        self._copies_beside = copies_beside
        self._num_first = num_first
        self._closing = False
        self._serving = False
        self._liveness_probe = LivenessProbe(limit_s)
        self._asked: Pending | None = None
        self._mail = ReceiverThread(self._channels, every_s=self._liveness_probe.every_s) if mail is None else mail
        self._mail.start(self._take, self._ask)

    def await_loaded(self, *, timeout_s: float) -> None:
        """Wait until every follower has its weights. Raises ConfigError."""
        self._await(Loaded, timeout_s=timeout_s, doing="has not loaded its weights")

    def await_ready(self, *, fingerprint: str, timeout_s: float) -> Ready:
        """Wait for all weights; return the minima of the followers' sizes, and all states' bytes.

        Raises ConfigError, also if a follower's weights differ from the leader's `fingerprint`.
        """
        ready: Mapping[int, Ready] = self._await(Ready, timeout_s=timeout_s, doing="has not loaded its weights")
        for rank, answer in sorted(ready.items()):
            if answer.fingerprint != fingerprint:
                raise ConfigError(
                    f"--model-path: {self.answers.names[rank]} reads other files than rank 0 (fingerprints "
                    f"{answer.fingerprint} and {fingerprint}); give all ranks the same checkpoint"
                )
        return Ready(
            min((answer.num_pages for answer in ready.values()), default=NO_LIMIT),
            fingerprint,
            min((answer.state_slots for answer in ready.values()), default=NO_LIMIT),
            min((answer.shadow_slots for answer in ready.values()), default=NO_LIMIT),
            min((answer.chunked_prefill_size for answer in ready.values()), default=NO_LIMIT),
            min((answer.max_prefill_tokens for answer in ready.values()), default=NO_LIMIT),
            sum(answer.slot_bytes for answer in ready.values()),
        )

    def place(self, pool: PoolSize) -> None:
        self._send_all(pool)

    def await_serving(self, *, timeout_s: float) -> None:
        self._await(Serving, timeout_s=timeout_s, doing="has no KV cache yet")
        self._serving = True

    def step(self, plan: Plan) -> "Pending | None":
        """Send a step; return a pending answer unless its result proves execution (`is_proven`)."""
        number = 0 if is_proven(plan, copies_beside=self._copies_beside) else self._next_number()
        self._send_all(step_of(plan, answer=number), blind=self._step_without_images(plan, number))
        return Pending(self, number) if number else None

    def on_collected(self, result: StepResult) -> None:
        """Raises GroupEnded for a failed step, which followers have computed."""
        if result.failure:
            raise GroupEnded(
                f"step {result.seq}: the other ranks are ahead of this one, which failed: {result.failure}"
            )

    def prepare(self, name: str, **args: Any) -> "Pending":
        """Start a read on all followers, concurrent with steps, for an `apply` of its number."""
        number = self._next_number()
        self._send_all(Prepare(number, name, args))
        return Pending(self, number)

    def apply(self, name: str, *, number: int = 0, **args: Any) -> "Pending":
        """Run an action on all followers after the steps sent. `number`: of its `prepare`."""
        pending = self._next_number()
        self._send_all(Apply(pending, name, {"prepared": number, **args} if number else args))
        return Pending(self, pending)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        for channel in self._channels.values():
            channel.shut()
        self._mail.close()
        for channel in self._channels.values():
            channel.close()

    def await_end(self, within_s: float) -> None:
        """Return once an end is reported; after `within_s`, report one without a name."""
        self._mail.wait_for(lambda: self.answers.end is not None, within_s)
        text = "a connection between ranks of two machines broke; the logs of the ranks may say why"
        self._note(partial(self.answers.note_end, text))

    def silent(self, *, within_s: float) -> list[int]:
        """Ranks that take no messages within `within_s`. Any thread may call it."""
        asked, answers = self.apply("answer").number, self.answers
        self._mail.wait_for(lambda: answers.end is not None or answers.has_all(asked), within_s)
        with self._lock:
            return sorted(set(answers.names) - set(answers.pop(asked)))

    def _next_number(self) -> int:
        with self._lock:
            return self.answers.next_number()

    def _step_without_images(self, plan: Plan, number: int) -> Step | None:
        has_images = bool(plan.encodes or plan.forgets) and self._num_first < NO_LIMIT
        return step_of(plan, answer=number, sees=False) if has_images else None

    def _send_all(self, message: ToFollower, *, blind: Step | None = None) -> None:
        for rank, channel in self._channels.items():
            try:
                channel.send(message if blind is None or rank < self._num_first else blind)
            except ChannelFull as error:
                text = f"{self.answers.names[rank]} reads no steps: {error}"
                self._note(partial(self.answers.note_end, text))
            except ChannelClosed:
                pass  # the reading thread reports it, with its reason

    def _await(self, key: object, *, timeout_s: float | None = None, doing: str = "") -> Mapping[int, Any]:
        """Take all answers to `key`. Raises ConfigError after `timeout_s`, and GroupEnded."""
        answers = self.answers
        there = self._mail.wait_for(lambda: answers.end is not None or answers.has_all(key), timeout_s)
        if answers.end is not None:
            raise GroupEnded(answers.end.text)
        missing = answers.missing(key)
        with self._lock:
            found = answers.pop(key)
        if not there:
            raise ConfigError(
                f"--dist-timeout: {missing} {doing} after {timeout_s:.0f} s; look at its log, or raise it"
            )
        return found

    def _take(self, rank: int, message: ToLeader | None) -> bool:
        if message is not None:
            self._note(partial(self.answers.take, rank, message))
        elif not self._closing:
            self._note(partial(self.answers.note_end, f"{self.answers.names[rank]} {self._processes[rank].ended()}"))
        return self.answers.end is None

    def _ask(self) -> None:
        """Check periodically that all take messages, on the delivering thread."""
        if self._serving and self.answers.end is None:
            with contextlib.suppress(GroupEnded):
                self._ask_at(time.monotonic())

    def _ask_at(self, now_s: float) -> None:
        if self._asked is not None and self._asked.there():
            self._asked.wait()
            self._asked = None
            self._liveness_probe.answered()
        if (late_s := self._liveness_probe.late_s(now_s)) is not None:
            missing = self.answers.missing(self._asked.number if self._asked is not None else None)
            self._note(
                partial(self.answers.note_end, f"{missing}: takes no messages for {late_s:.1f} s (--watchdog-timeout)")
            )
        elif self._liveness_probe.due(now_s):
            self._asked = self.apply("answer")

    def _note(self, note: Callable[[], None]) -> None:
        with self._lock:
            before = self.answers.end
            note()
            end, calls = self.answers.end, self.answers.take_calls()
        for call in calls:
            call()
        if end is not None and before is None and not self._closing:
            self._mail.notify()
            self._on_end(*end)


class Pending:
    """Answers of all followers, in flight."""

    def __init__(self, followers: Followers, number: int) -> None:
        self._followers = followers
        self.number = number

    def wait(self) -> dict[int, Any]:
        """Values by rank. Raises ConfigError with the rank that refused."""
        answers = self._followers._await(self.number)
        for rank, answer in sorted(answers.items()):
            if answer.error:
                raise ConfigError(f"{self._followers.answers.names[rank]}: {answer.error}")
        return {rank: answer.value for rank, answer in answers.items()}

    def there(self) -> bool:
        return self._followers.answers.has_all(self.number)

    def when_there(self, call: Callable[[], None]) -> None:
        self._followers._note(partial(self._followers.answers.when_all, self.number, call))


Own = TypeVar("Own")


class OnAllRanks(Generic[Own]):
    """A leader's `own` part, and those of its followers."""

    def __init__(self, own: Own, followers: Followers) -> None:
        self._own = own
        self._followers = followers
