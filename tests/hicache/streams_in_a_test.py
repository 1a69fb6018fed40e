"""Streams in place of CUDA's: what is enqueued runs later, in any order that marks allow."""

import random
from collections import deque
from collections.abc import Callable


class MarkInATest:
    def __init__(self, streams: "StreamsInATest | LateStream") -> None:
        self._streams = streams
        self.reached = False

    def reach(self) -> None:
        self.reached = True

    def hold_main(self) -> None:
        self._streams.hold_main(self)

    def wait(self) -> None:
        while not self.reached:
            self._streams.run_one()


class StreamInATest:
    def __init__(self, streams: "StreamsInATest | LateStream") -> None:
        self._streams = streams
        self._ahead: deque[MarkInATest | Callable[[], None]] = deque()  # a mark: wait for it; else: work

    def run(self, work: Callable[[], None]) -> None:
        self._ahead.append(work)

    def mark(self) -> MarkInATest:
        mark = MarkInATest(self._streams)
        self._ahead.append(mark.reach)
        return mark

    def follow(self, mark: MarkInATest) -> None:  # type: ignore[override]
        self._ahead.append(mark)

    def follow_main(self) -> None:
        assert isinstance(self._streams, StreamsInATest)
        self.follow(self._streams.main.mark())

    @property
    def can_run(self) -> bool:
        while self._ahead and isinstance(self._ahead[0], MarkInATest) and self._ahead[0].reached:
            self._ahead.popleft()
        return bool(self._ahead) and not isinstance(self._ahead[0], MarkInATest)

    def run_one(self) -> None:
        work = self._ahead.popleft()
        assert not isinstance(work, MarkInATest)
        work()


class StreamsInATest:
    """`main` and those that `make` made."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.main = StreamInATest(self)
        self._all = [self.main]

    def make(self) -> StreamInATest:
        self._all.append(StreamInATest(self))
        return self._all[-1]

    def hold_main(self, mark: MarkInATest) -> None:
        self.main.follow(mark)

    def run_one(self) -> None:
        self._random.choice([stream for stream in self._all if stream.can_run]).run_one()

    def run_some(self) -> None:
        for _ in range(self._random.randrange(6)):
            if any(stream.can_run for stream in self._all):
                self.run_one()


class LateStream(StreamInATest):
    """Beside a main that runs at once: what is enqueued runs when main, or the host, must wait for it, and not before."""

    def __init__(self) -> None:
        super().__init__(self)

    def hold_main(self, mark: MarkInATest) -> None:
        mark.wait()

    def follow(self, mark: MarkInATest) -> None:  # type: ignore[override]
        self.run(mark.wait)

    def follow_main(self) -> None:
        """Main has run all that it has."""
