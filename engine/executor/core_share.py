"""The threads of two lanes on a CPU, shared out kernel by kernel.

    prefill lane   |####|####|##        |####|    all threads, and what a decode step leaves while one runs
    decode lane              |# # # # # |         its share, or all threads where no prompt is computed

A prompt step of a large chunk is a few hundred kernels of some milliseconds. Before each of them its thread asks for the number of
threads: so a decode step that begins gets its share within one kernel, however long the prompt. After Bullet (arXiv:2504.19516),
which gives out the multiprocessors of a GPU anew between layers.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from engine.core.lanes import Lane

PROMPT_NICENESS = (
    2  # more than the process has: the loop's thread, decodes and frontends go first where threads share a core
)


class CoreShare:
    """`num_threads`: of both lanes together. Called from any thread."""

    def __init__(self, num_threads: int) -> None:
        assert num_threads >= 1
        self.num_threads = num_threads
        self._of_decodes = num_threads
        self._decoding = False
        self._prompts = False
        self._changed = threading.Condition()

    def give(self, decode_threads: int) -> None:
        """Set the threads of decode steps beside prompts, from the next step on."""
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

    def torch_for(self, lane: Lane) -> int:
        """Return the threads of a whole step of `lane` where torch computes it: they cannot change within."""
        if lane is Lane.DECODE:
            return self.for_decodes()
        return max(1, self.num_threads - self._of_decodes)

    def for_decodes(self) -> int:
        """Return the threads of the decode lane's next kernels."""
        return self._of_decodes if self._prompts else self.num_threads

    def for_prompts(self) -> int:
        """Return the threads of the prefill lane's next kernel; wait for the end of a decode step that leaves none."""
        if not self._decoding:
            return self.num_threads
        with self._changed:
            self._changed.wait_for(lambda: not self._decoding or self._of_decodes < self.num_threads)
            return self.num_threads - self._of_decodes if self._decoding else self.num_threads


def be_nice() -> None:
    """Let others go before this thread, and those that it starts."""
    with suppress(OSError):  # a system may forbid it: the share still holds
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + PROMPT_NICENESS)
