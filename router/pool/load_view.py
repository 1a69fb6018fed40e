"""What a router process knows of its siblings: the load they put on workers, and what they have learnt of them.

An interface, and what holds without siblings. Pure.
"""

from collections.abc import Sequence
from typing import Protocol

# Numbers that a process has learnt of a worker; the first is not 0. What they mean is said by who learns (forecast.py).
NUM_LEARNT = 15


class LoadView(Protocol):
    """See shared_load.py, which is the one for several processes. A slot is a worker's place in it."""

    @property
    def has_siblings(self) -> bool: ...

    def take(self, url: str) -> int: ...

    def give_back(self, slot: int) -> None: ...

    def publish(self, slot: int, *, tokens: int, requests: int) -> None: ...

    def publish_live(self, requests: int) -> None: ...

    def others_tokens(self, slot: int) -> int: ...

    def others_requests(self, slot: int) -> int: ...

    def others_live(self) -> int: ...

    def publish_open(self, slot: int, until_s: float) -> None: ...

    def others_open(self, now_s: float) -> Sequence[int]: ...

    def publish_learnt(self, slot: int, numbers: Sequence[float]) -> None: ...

    def others_learnt(self, slot: int) -> list[Sequence[float]]: ...

    def add_client(self, client: str, step: int) -> None: ...

    def others_of_client(self, client: str) -> int: ...


class Alone:
    """One process: there are no others."""

    has_siblings = False

    def take(self, url: str) -> int:
        return 0

    def give_back(self, slot: int) -> None:
        """Nobody looks."""

    def publish(self, slot: int, *, tokens: int, requests: int) -> None:
        """Nobody looks."""

    def publish_live(self, requests: int) -> None:
        """Nobody looks."""

    def others_tokens(self, slot: int) -> int:
        return 0

    def others_requests(self, slot: int) -> int:
        return 0

    def others_live(self) -> int:
        return 0

    def publish_open(self, slot: int, until_s: float) -> None:
        """Nobody looks."""

    def others_open(self, now_s: float) -> Sequence[int]:
        return ()

    def publish_learnt(self, slot: int, numbers: Sequence[float]) -> None:
        """Nobody looks."""

    def others_learnt(self, slot: int) -> list[Sequence[float]]:
        return []

    def add_client(self, client: str, step: int) -> None:
        """Nobody looks."""

    def others_of_client(self, client: str) -> int:
        return 0


ALONE = Alone()
