"""Clients whose streams broke come again behind the last event that they have: when, where, with how much; what they may be told.

A client has any beginning of what it was sent: bytes are lost on their way, or it loses them itself. Now and then it asks twice at once.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from service.http.reconnect import LAST_EVENT_HEADER
from service.http.routes import DONE, REQUEST_ID_HEADER
from tools.simulation.options import Options

MOST_RETURNS = 8  # of one stream
MOST_LOST = 3  # events that were sent and that the client does not have
TWICE_RATE = 0.2
LATE_RATE = 0.1  # of returns when the window is over
BREAKS_AFTER = (0, 1, 1, 2, 5)  # events of a stream of the healthy cluster; 0: it does not break


@dataclass(frozen=True)
class Event:
    """`end`: where it ends in the stream. `id`: "" without one."""

    end: int
    data: bytes
    id: str


def events_of(stream: bytes) -> list[Event]:
    """Whole ones, but the mark of the end."""
    found, end = list[Event](), 0
    for text in stream.split(b"\n\n")[:-1]:
        end += len(text) + 2
        if text.startswith(b"data: ") and text + b"\n\n" != DONE:
            data, _, id = text[len(b"data: ") :].partition(b"\nid: ")
            found.append(Event(end, data, id.decode()))
    return found


@dataclass(eq=False)
class Returns:
    """What the clients of a run decide about it. `why_gone(tag, address, asked_s)`: why a router may know nothing of a stream; "": it must."""

    options: Options
    draw: random.Random
    why_gone: Callable[[str, str, float], str]

    def may(self, stream: bytes, *, count: int, waited_s: float) -> bool:
        """Whether a client comes again, for the time `count`, `waited_s` after its stream broke."""
        has_id = any(event.id for event in events_of(stream))
        return has_id and count < MOST_RETURNS and waited_s < self.options.resume_window_s

    def pause_s(self) -> float:
        is_late = self.draw.random() < LATE_RATE
        return self.options.resume_window_s * (1.5 if is_late else self.draw.uniform(0, 0.5))

    def breaks_after(self) -> int:
        return self.draw.choice(BREAKS_AFTER) if self.options.resume_window_s else 0

    def kept_by_client(self, stream: bytes) -> bytes:
        """Up to one of the last events with an id."""
        ends = [event.end for event in events_of(stream) if event.id]
        return stream[: self.draw.choice(ends[-MOST_LOST:])]

    def asks_twice(self) -> bool:
        return self.draw.random() < TWICE_RATE


def headers_of(name: str, stream: bytes, *, again: bool) -> dict[str, str]:
    """What names the request, and where it goes on."""
    return {REQUEST_ID_HEADER: name, **({LAST_EVENT_HEADER: last_id(stream)} if again else {})}


def last_id(stream: bytes) -> str:
    return events_of(stream)[-1].id
