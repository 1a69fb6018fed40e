"""Threads of a process: usable cores, and work with its outcome in a future. Never torch."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

# ---- Background threads with futures.

T = TypeVar("T")


def start_in_thread(work: Callable[[], T], *, name: str, when_done: Callable[[], object]) -> Future[T]:
    """`when_done` is called in the thread, after the future is set."""
    future: Future[T] = Future()
    future.add_done_callback(lambda _: when_done())
    # a daemon, so that an ending process does not wait for a disk
    threading.Thread(target=run_into, args=(future, work), name=name, daemon=True).start()
    return future


def run_into(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


# ---- Usable CPU cores. Never torch: threads are counted before its import.


def usable_cores() -> int:
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(value) if value.isdigit() and int(value) > 0 else len(os.sched_getaffinity(0))
