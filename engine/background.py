"""Work whose outcome a future has."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_in_thread(work: Callable[[], T], *, name: str, when_done: Callable[[], None]) -> Future[T]:
    """Run `work` in a thread called `name`, which calls `when_done` once the future has the result or the error."""
    future: Future[T] = Future()
    future.add_done_callback(lambda _: when_done())
    # a daemon: an ending process does not wait for a disk
    threading.Thread(target=run_into, args=(future, work), name=name, daemon=True).start()
    return future


def run_into(future: Future[T], work: Callable[[], T]) -> None:
    """Run `work`; `future` returns or raises its outcome."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
