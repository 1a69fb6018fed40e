"""How far a checkpoint is loaded: a bar on a terminal, in a log a line every few seconds."""

import logging
import time
from collections.abc import Callable

from tqdm import tqdm  # type: ignore[import-untyped]

LINE_EVERY_S = 10.0

log = logging.getLogger(__name__)


class LoadProgress:
    """`total`: tensors. `bar`: a bar on stderr in place of lines in the log."""

    def __init__(self, total: int, *, bar: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._done, self._clock = total, 0, clock
        self._begin_s = self._said_s = clock()
        self._bar = tqdm(total=total, desc="Loading weights", unit="tensor", disable=not bar)
        self._speaks = not bar

    def update(self, count: int) -> None:
        self._done += count
        self._bar.update(count)
        now_s = self._clock()
        if self._speaks and now_s - self._said_s >= LINE_EVERY_S:
            self._said_s = now_s
            share, taken_s = 100 * self._done // self._total, now_s - self._begin_s
            log.info("loading weights: %d of %d tensors (%d%%) in %.0f s", self._done, self._total, share, taken_s)

    def close(self) -> None:
        self._bar.close()
