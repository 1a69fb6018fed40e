"""Leader's receiver thread for all followers' sockets."""

import selectors
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from engine.ranks.channel import Channel
from engine.ranks.messages import ToLeader
from service.process.message_stream import ChannelClosed

# (rank, message or None at its end) -> False to stop
Take = Callable[[int, ToLeader | None], bool]


class Mail(Protocol):
    def start(self, take: Take, tick: Callable[[], None]) -> None:
        """Start; `tick` is also called without messages."""

    def wait_for(self, there: Callable[[], bool], timeout_s: float | None) -> bool:
        """Return False after `timeout_s`."""

    def notify(self) -> None:
        """Let waiting threads check again."""

    def close(self) -> None:
        """Stop; all channels are shut."""


class MailThread:
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
