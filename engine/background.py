"""Background threads with futures."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_in_thread(work: Callable[[], T], *, name: str, when_done: Callable[[], None]) -> Future[T]:
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
