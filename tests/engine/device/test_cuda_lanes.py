"""Streams of two lanes on a GPU, as far as a machine without one shows: what is enqueued where, and when a step counts as done."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.config import EngineConfig
from engine.device.device import Device
from engine.device.step_memory import Recording
from engine.executor.executor import Executor
from engine.executor.executor import Stream as AnyStream
from engine.executor.graphs import CudaCapture
from engine.executor.layer_marks import LayerMarks
from engine.pdmux.build import CudaLane, build_lanes

WAIT_S = 60.0


class Event:
    """The device reaches it when the test says so."""

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "a thread that waits for a step takes a core from those that compute"
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
        self.device, self.priority = device, priority

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


class Graph:
    """What is recorded runs again."""

    def replay(self) -> None:
        """Nothing runs here."""


@contextmanager
def recording(graph: Graph, *, pool: object, stream: object, **_: object) -> Iterator[None]:
    with on(stream):
        yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    events.clear()
    stand_ins = {"Event": Event, "Stream": Stream, "stream": on, "synchronize": lambda device: None}
    stand_ins |= {"CUDAGraph": Graph, "graph": recording, "graph_pool_handle": object}
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def lanes(gpu: None) -> Iterator[tuple[CudaLane, CudaLane]]:
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


def test_kernels_of_a_lane_s_graphs_have_its_priority_and_one_stream_in_all_recordings(gpu: None) -> None:
    """A graph's kernels keep the priority of the stream that they were recorded on."""
    found: dict[int, list[object]] = {}

    def build(*, records: Recording, stream: AnyStream) -> Device:
        assert isinstance(stream, CudaLane) and records.capture is not None
        before = len(events)
        enqueued = stream.submit(lambda: current[-1])
        reach(before + 1)
        priority = enqueued.result().priority  # type: ignore[attr-defined]
        again = (records.capture(), records.capture())  # new weights are recorded again
        found[priority] = [capture.capture(lambda: current[-1])() for capture in again]
        assert isinstance(again[0], CudaCapture) and records.decodes is (priority < 0)
        stream.close()
        return Device(Executor([]), LayerMarks(torch.device("cuda")), adapters=None, states=None, windows=None)

    build_lanes(build, EngineConfig(device="cuda", num_threads=1), Recording(), attention=lambda: None)
    assert [(priority, [stream.priority for stream in streams]) for priority, streams in found.items()] == [  # type: ignore[attr-defined]
        (-1, [-1, -1]),
        (0, [0, 0]),
    ]
    assert all(first is second for first, second in found.values())
