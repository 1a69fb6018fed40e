"""The leader's side of its followers: what they are sent, what they answered, and the end of any of them.

One thread reads all answers. A follower that ends, fails or reads no messages is reported once, by name; the group cannot go on then.
"""

import contextlib
import selectors
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from engine.core.plan import Plan
from engine.ranks.channel import Channel, ChannelClosed, ChannelFull
from engine.ranks.messages import Apply, Done, Failed, PoolSize, Prepare, Ready, Serving, ToFollower, ToLeader, step_of
from engine.ranks.roll_call import RollCall
from service.flags import ConfigError


class Process(Protocol):
    """A follower's process, for messages alone."""

    @property
    def name(self) -> str:
        """Such as "rank 2 of 4 (pid 4711)"."""

    def ended(self) -> str:
        """How it ended, such as "ended: SIGKILL"."""


class GroupEnded(RuntimeError):
    """A follower has ended. The text names it and says why."""


# (what to print, whether the operator caused it): from the reading thread, or the thread that sends
OnEnd = Callable[[str, bool], None]


class Followers:
    """`members`: channel and process of every follower, by rank. `on_end` is called once, and ends the process or its loop.

    `limit_s`: longest step; followers that serve and answer nothing for about twice as long have ended, too. 0: no limit.
    """

    def __init__(
        self, members: Mapping[int, tuple[Channel[ToLeader], Process]], *, on_end: OnEnd, limit_s: float = 0.0
    ) -> None:
        self._channels = {rank: channel for rank, (channel, _) in members.items()}
        self._processes = {rank: process for rank, (_, process) in members.items()}
        self._on_end = on_end
        self._answers: dict[object, dict[int, Any]] = {}  # by what is answered: rank -> answer
        self._calls: dict[object, Callable[[], None]] = {}  # when all have answered
        self._changed = threading.Condition()
        self._ended: str | None = None
        self._closing = False
        self._number = 0
        self._serving = False
        self._roll_call = RollCall(limit_s)
        self._asked: Pending | None = None
        self._thread = threading.Thread(target=self._read_all, name="followers", daemon=True)
        self._thread.start()

    def await_ready(self, *, fingerprint: str, timeout_s: float) -> int:
        """Wait until every follower has its weights; return the least KV pages that one of them holds.

        `fingerprint`: of the leader's weights. Raises ConfigError, also where a follower has others.
        """
        ready: Mapping[int, Ready] = self._await(Ready, timeout_s=timeout_s, doing="has not loaded its weights")
        for rank, answer in sorted(ready.items()):
            if answer.fingerprint != fingerprint:
                raise ConfigError(
                    f"--model-path: {self._processes[rank].name} reads other files than rank 0 (fingerprints "
                    f"{answer.fingerprint} and {fingerprint}); give all ranks the same checkpoint"
                )
        return min(answer.num_pages for answer in ready.values())

    def place(self, pool: PoolSize) -> None:
        self._send_all(pool)

    def await_serving(self, *, timeout_s: float) -> None:
        self._await(Serving, timeout_s=timeout_s, doing="has no KV cache yet")
        self._serving = True

    def step(self, plan: Plan) -> "Pending | None":
        """Send a step. Return its answer to come, if no result of the step proves that the followers have run it.

        Every sum of a forward needs all ranks, so the result of a step with items does.
        """
        proven = bool(plan.items) or not plan.copies_pages
        number = 0 if proven else self._next_number()
        self._send_all(step_of(plan, answer=number))
        return None if proven else Pending(self, number)

    def prepare(self, name: str, **args: Any) -> "Pending":
        """Let every follower read something beside its steps, for an `apply` of the same number."""
        number = self._next_number()
        self._send_all(Prepare(number, name, args))
        return Pending(self, number)

    def apply(self, name: str, *, number: int = 0, **args: Any) -> "Pending":
        """Let every follower do something behind the steps that it has. `number`: of the `prepare` before it."""
        pending = self._next_number()
        self._send_all(Apply(pending, name, {"prepared": number, **args} if number else args))
        return Pending(self, pending)

    def close(self) -> None:
        """End the followers: they read the end of file. A no-op the second time."""
        if self._closing:
            return
        self._closing = True
        for channel in self._channels.values():
            channel.shut()
        self._thread.join()
        for channel in self._channels.values():
            channel.close()

    def _next_number(self) -> int:
        with self._changed:
            self._number += 1
            return self._number

    def _send_all(self, message: ToFollower) -> None:
        for rank, channel in self._channels.items():
            try:
                channel.send(message)
            except ChannelFull as error:
                self._end(f"{self._processes[rank].name} reads no steps: {error}", refused=False)
            except ChannelClosed:
                pass  # the reading thread reports it, with its reason

    def _await(self, key: object, *, timeout_s: float | None = None, doing: str = "") -> Mapping[int, Any]:
        """The answers of all followers to `key`, which are forgotten. Raises ConfigError after `timeout_s`, and GroupEnded."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._ended is not None or self._has_all(key), timeout_s)
            if self._ended is not None:
                raise GroupEnded(self._ended)
            answers = self._answers.pop(key, {})
            if not there:
                missing = [self._processes[rank].name for rank in self._channels if rank not in answers]
                raise ConfigError(
                    f"--dist-timeout: {', '.join(missing)} {doing} after {timeout_s:.0f} s; look at its log, or raise it"
                )
            return answers

    def _has_all(self, key: object) -> bool:
        return len(self._answers.get(key, ())) == len(self._channels)

    def _read_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            while not self._closing and self._ended is None:
                for key, _ in selector.select(self._roll_call.every_s):
                    self._read(key.data)
                if self._serving:
                    with contextlib.suppress(GroupEnded):
                        self._ask(time.monotonic())

    def _ask(self, now_s: float) -> None:
        """Ask whether all take messages, from time to time. In the reading thread."""
        if self._asked is not None and self._asked.there():
            self._asked.wait()
            self._asked = None
            self._roll_call.answered()
        if (late_s := self._roll_call.late_s(now_s)) is not None:
            answers = self._answers.get(self._asked.number, {}) if self._asked is not None else {}
            missing = [self._processes[rank].name for rank in self._channels if rank not in answers]
            self._end(f"{', '.join(missing)}: takes no messages for {late_s:.1f} s (--watchdog-timeout)", refused=False)
        elif self._roll_call.due(now_s):
            self._asked = self.apply("answer")

    def _read(self, rank: int) -> None:
        try:
            message = self._channels[rank].receive()
        except ChannelClosed:
            self._end(f"{self._processes[rank].name} {self._processes[rank].ended()}", refused=False)
            return
        match message:
            case Failed(text=text, refused=refused):
                self._end(f"{self._processes[rank].name}: {text}", refused=refused)
            case Done(number=number):
                self._note(number, rank, message)
            case Ready() | Serving():
                self._note(type(message), rank, message)

    def _note(self, key: object, rank: int, answer: Any) -> None:
        with self._changed:
            self._answers.setdefault(key, {})[rank] = answer
            call = self._calls.pop(key, None) if self._has_all(key) else None
            self._changed.notify_all()
        if call is not None:
            call()

    def _call_when_all(self, key: object, call: Callable[[], None]) -> None:
        with self._changed:
            there = self._has_all(key)
            if not there:
                self._calls[key] = call
        if there:
            call()

    def _end(self, text: str, *, refused: bool) -> None:
        with self._changed:
            if self._ended is not None or self._closing:
                return
            self._ended = text
            self._changed.notify_all()
        self._on_end(text, refused)


class Pending:
    """An answer of every follower that is on its way."""

    def __init__(self, followers: Followers, number: int) -> None:
        self._followers = followers
        self.number = number

    def wait(self) -> dict[int, Any]:
        """The values by rank. Raises ConfigError for what a follower refused; it names the rank."""
        answers = self._followers._await(self.number)
        for rank, answer in sorted(answers.items()):
            if answer.error:
                raise ConfigError(f"{self._followers._processes[rank].name}: {answer.error}")
        return {rank: answer.value for rank, answer in answers.items()}

    def there(self) -> bool:
        """Whether `wait` returns at once."""
        return self._followers._has_all(self.number)

    def when_there(self, call: Callable[[], None]) -> None:
        """Call it once `there`, in any thread."""
        self._followers._call_when_all(self.number, call)
