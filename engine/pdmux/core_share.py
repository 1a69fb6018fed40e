"""Thread partition of prefill and decode streams on a CPU, per kernel.

  prefill   |####|####|##        |####|    all threads, or those that a decode step leaves
  decode              |# # # # # |         its share, or all threads without prompts

A kernel takes milliseconds, so decode soon gets its share. After Bullet (arXiv:2504.19516), which
reassigns GPU multiprocessors between layers.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from engine.core.plan import Phase

PROMPT_NICENESS = 2  # more than the process: the loop's thread, decodes and frontends win on a shared core


class CoreShare:
    def __init__(self, num_threads: int) -> None:
        assert num_threads >= 1
        self.num_threads = num_threads
        self._of_decodes = num_threads
        self._decoding = False
        self._prompts = False
        self._changed = threading.Condition()

    def give(self, decode_threads: int) -> None:
        assert 1 <= decode_threads <= self.num_threads
        with self._changed:
            self._of_decodes = decode_threads
            self._changed.notify_all()

    @contextmanager
    def decode_step(self) -> Iterator[None]:
        self._decoding = True
        try:
            yield
        finally:
            with self._changed:
                self._decoding = False
                self._changed.notify_all()

    @contextmanager
    def prompt_step(self) -> Iterator[None]:
        self._prompts = True
        try:
            yield
        finally:
            self._prompts = False

    def torch_for(self, phase: Phase) -> int:
        """Threads of a whole step by torch, which cannot change them."""
        if phase is Phase.DECODE:
            return self.for_decodes()
        return max(1, self.num_threads - self._of_decodes)

    def for_decodes(self) -> int:
        return self._of_decodes if self._prompts else self.num_threads

    def for_prompts(self) -> int:
        """Threads of prefill's next kernel; waits while a decode step takes all."""
        if not self._decoding:
            return self.num_threads
        with self._changed:
            self._changed.wait_for(lambda: not self._decoding or self._of_decodes < self.num_threads)
            return self.num_threads - self._of_decodes if self._decoding else self.num_threads


def be_nice() -> None:
    with suppress(OSError):  # a system may forbid it: the share still holds
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + PROMPT_NICENESS)
