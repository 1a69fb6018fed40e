"""Slow work beside a running loop."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_in_thread(work: Callable[[], T], *, name: str, when_done: Callable[[], None]) -> Future[T]:
    """Run `work` in a thread called `name`, which calls `when_done` once the future has the result or the error."""
    future: Future[T] = Future()
    future.add_done_callback(lambda _: when_done())

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised by the future
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()  # a daemon: an ending process does not wait for a disk
    return future
