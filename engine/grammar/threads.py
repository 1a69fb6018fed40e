"""Threads that compile grammars; a timed-out compilation gets a replacement thread.

`ask` --> pending --> running --> done
             |
             overdue --> given up --> done (late), or never

No library can stop a compilation, so it continues at the lowest CPU priority; a late result counts.
Single-threaded caller.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.sampling_params import GrammarSpec

LOWEST_PRIORITY = 19

Found = TypeVar("Found")


@dataclass(slots=True, eq=False)
class _Compilation(Generic[Found]):
    """The thread writes `found` and `thread_id`, the loop the rest."""

    begun_s: float
    thread_id: int | None = None
    found: Found | None = None


class CompileThreads(Generic[Found]):
    """At most `num_threads` compilations, plus timed-out ones. `compile_` never raises."""

    def __init__(
        self,
        compile_: Callable[[GrammarSpec], Found],
        *,
        prepare: Callable[[], None],
        wakeup: Callable[[], None],
        num_threads: int,
        max_given_up: int,
        timeout_s: float,
    ) -> None:
        assert num_threads >= 1 and max_given_up >= 1
        self._compile = compile_
        self._prepare = prepare
        self._wakeup = wakeup
        self._num_threads = num_threads
        self._max_given_up = max_given_up
        self._timeout_s = timeout_s
        self._prepared = threading.Event()
        self._pending: dict[GrammarSpec, None] = {}
        self._running: dict[GrammarSpec, _Compilation[Found]] = {}
        self._given_up: dict[GrammarSpec, _Compilation[Found]] = {}
        self._closed = False
        threading.Thread(target=self._get_prepared, name="grammar prepare", daemon=True).start()

    @property
    def is_stuck(self) -> bool:
        """True if too many timed-out compilations run."""
        return len(self._given_up) >= self._max_given_up

    def __contains__(self, spec: GrammarSpec) -> bool:
        return spec in self._pending or spec in self._running or spec in self._given_up

    def ask(self, spec: GrammarSpec, now_s: float) -> None:
        assert spec not in self
        self._pending[spec] = None
        self._begin(now_s)

    def forget(self, spec: GrammarSpec) -> None:
        self._pending.pop(spec, None)

    def poll(self, now_s: float) -> dict[GrammarSpec, Found]:
        """Collect results, give up overdue compilations, start pending ones."""
        found = {**_take_done(self._given_up), **_take_done(self._running)}
        for spec in [s for s, one in self._running.items() if now_s - one.begun_s >= self._timeout_s]:
            self._given_up[spec] = self._running.pop(spec)
            _lower_priority(self._given_up[spec].thread_id)
        self._begin(now_s)
        return found

    def close(self) -> None:
        """Start nothing more. Running threads are daemons."""
        self._closed = True

    def _begin(self, now_s: float) -> None:
        while self._pending and len(self._running) < self._num_threads and self._prepared.is_set() and not self._closed:
            spec = next(iter(self._pending))
            del self._pending[spec]
            one = self._running[spec] = _Compilation[Found](now_s)
            threading.Thread(target=self._run, args=(spec, one), name="grammar", daemon=True).start()

    def _run(self, spec: GrammarSpec, one: _Compilation[Found]) -> None:
        one.thread_id = threading.get_native_id()
        one.found = self._compile(spec)
        self._wakeup()

    def _get_prepared(self) -> None:
        try:
            self._prepare()
        finally:  # a failure recurs at the first compilation and reaches its request
            self._prepared.set()
            self._wakeup()


def _take_done(compilations: dict[GrammarSpec, _Compilation[Found]]) -> dict[GrammarSpec, Found]:
    done = {spec: one.found for spec, one in compilations.items() if one.found is not None}
    for spec in done:
        del compilations[spec]
    return done


def _lower_priority(thread_id: int | None) -> None:
    """Linux threads have their own priority."""
    with contextlib.suppress(OSError):
        if thread_id is not None:
            os.setpriority(os.PRIO_PROCESS, thread_id, LOWEST_PRIORITY)
