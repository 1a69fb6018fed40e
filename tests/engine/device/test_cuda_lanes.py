"""Streams of two lanes on a GPU, as far as a machine without one shows: what is enqueued where, and when a step counts as done."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.pdmux.build import CudaLane

WAIT_S = 60.0


class Event:
    """The device reaches it when the test says so."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        events.append(self)

    def record(self, stream: object) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        assert self.reached.wait(WAIT_S)


class Stream:
    def __init__(self, device: torch.device, *, priority: int) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        """Nothing runs here."""


events: list[Event] = []
current: list[object] = []


def await_events(count: int) -> None:
    """Wait until so many steps are enqueued."""
    deadline = time.monotonic() + WAIT_S
    while len(events) < count:
        assert time.monotonic() < deadline, "nothing is enqueued"
        time.sleep(0.001)


def reach(count: int) -> None:
    """Let the device come to the end of so many steps."""
    await_events(count)
    for event in events[:count]:
        event.reached.set()


@contextmanager
def on(stream: object) -> Iterator[None]:
    current.append(stream)
    yield
    current.pop()


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CudaLane, CudaLane]]:
    events.clear()
    for name, value in {"Event": Event, "Stream": Stream, "stream": on, "synchronize": lambda device: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    device = torch.device("cuda")
    both = CudaLane(device, priority=-1), CudaLane(device, priority=0)
    yield both
    for lane in both:
        lane.close()


def test_work_is_enqueued_on_the_lane_s_stream_in_a_thread_of_its_own(lanes: tuple[CudaLane, CudaLane]) -> None:
    task = lanes[0].submit(lambda: (current[-1], threading.get_ident(), torch.is_inference_mode_enabled()))
    reach(1)
    stream, thread, inference = task.result()
    assert stream is events[0].stream and stream.priority == -1  # type: ignore[attr-defined]
    assert thread != threading.get_ident() and inference


def test_a_step_is_done_when_the_device_has_reached_its_end_and_calls_then(lanes: tuple[CudaLane, CudaLane]) -> None:
    called = threading.Event()
    task = lanes[1].submit(lambda: 7)
    task.add_done_callback(lambda _: called.set())
    lanes[1].submit(lambda: None)
    await_events(2)
    assert not task.done() and not called.is_set()
    events[0].reached.set()
    assert called.wait(WAIT_S) and task.done() and task.result() == 7


def test_a_lane_that_is_still_enqueuing_does_not_keep_the_other(lanes: tuple[CudaLane, CudaLane]) -> None:
    gate = threading.Event()
    slow = lanes[1].submit(lambda: gate.wait(WAIT_S))
    quick = lanes[0].submit(lambda: 1)
    reach(1)
    assert quick.result() == 1 and not slow.done()
    gate.set()


def test_what_a_step_raises_comes_out_of_its_result(lanes: tuple[CudaLane, CudaLane]) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("no memory")

    task = lanes[0].submit(fail)
    reach(1)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        task.result()
