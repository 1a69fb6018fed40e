"""Streams of two lanes on a GPU, as far as a machine without one shows: what is enqueued where, and when a step counts as done."""

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.device.device import Device
from engine.device.memory_plan import unmeasured
from engine.device.step_memory import Recording
from engine.executor.executor import Executor
from engine.executor.executor import Stream as AnyStream
from engine.executor.graphs import WARM_UP_RUNS
from engine.executor.layer_marks import LayerMarks
from engine.kernels.tape import sm_limit
from engine.pdmux.build import build_lanes, streams_per_phase
from engine.pdmux.cuda_lane import CudaLane, Partition
from engine.pdmux.phases import divisions, grain_of
from tests.engine.device.driver_stand_in import Driver, install

WAIT_S = 60.0
DEVICE = torch.device("cuda")


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
        self.waited: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        """Nothing runs here."""


def external(handle: int, *, device: torch.device) -> Stream:
    """A stream of the driver's, by its handle."""
    found = Stream(device, priority=driver.streams[handle][1])
    found.sms = driver.streams[handle][0]  # type: ignore[attr-defined]
    return found


driver = Driver()
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
    stand_ins |= {"CUDAGraph": Graph, "graph": recording, "graph_pool_handle": object, "ExternalStream": external}
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    driver.streams, driver.broken, driver.missing = {}, "", ""
    install(monkeypatch, driver)


@pytest.fixture
def lanes(gpu: None) -> Iterator[tuple[CudaLane, CudaLane]]:
    first, second = (CudaLane([Partition(Stream(DEVICE, priority=at))], chosen=lambda: 0) for at in (-1, 0))  # type: ignore[arg-type]
    both = first, second
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


# ---- both lanes of a GPU


class Built:
    """Both lanes, as an engine builds them."""

    def __init__(self, *, itl_s: float | None = 0.03) -> None:
        self.lanes: dict[bool, CudaLane] = {}  # by whether it decodes
        self.records: dict[bool, Recording] = {}
        config = EngineConfig(device="cuda", num_threads=1, enable_pdmux=True, pdmux_itl_s=itl_s)
        self.device = build_lanes(self._build, config, Recording(), attention=lambda: None)
        self.streams = streams_per_phase(config)

    def _build(self, *, records: Recording, stream: AnyStream) -> Device:
        assert isinstance(stream, CudaLane) and records.decodes is not records.prefills
        self.lanes[records.decodes], self.records[records.decodes] = stream, records
        return Device(Executor([]), LayerMarks(DEVICE), adapters=None, states=None, windows=None)

    def where(self, *, decodes: bool) -> Any:
        """The stream of a step that is submitted now."""
        before = len(events)
        enqueued = self.lanes[decodes].submit(lambda: current[-1])
        reach(before + 1)
        return enqueued.result()

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()


@pytest.fixture
def built(gpu: None) -> Iterator[Built]:
    found = Built()
    yield found
    found.close()


def test_each_division_gives_the_lanes_sms_of_their_own_and_together_all(built: Built) -> None:
    found = []
    for parts in range(1, built.device.parts):
        built.device.give(parts)
        decodes, prompts = (built.where(decodes=phase) for phase in (True, False))
        assert (decodes.priority, prompts.priority) == (-1, 0)
        assert not decodes.sms & prompts.sms and decodes.sms | prompts.sms == set(range(132))
        found.append((len(decodes.sms), len(prompts.sms)))
    assert found == [(32, 100), (64, 68), (96, 36)] and built.streams == 4


def test_a_lane_alone_has_the_whole_gpu_with_its_priority(built: Built) -> None:
    built.device.give(2)
    built.device.give(0)
    for decodes, priority in ((True, -1), (False, 0)):
        stream = built.where(decodes=decodes)
        assert not hasattr(stream, "sms") and stream.priority == priority


def test_without_an_objective_there_is_one_division_in_halves(gpu: None) -> None:
    built = Built(itl_s=None)
    assert (built.device.parts, built.streams) == (2, 2)
    built.device.give(1)
    assert [len(built.where(decodes=decodes).sms) for decodes in (True, False)] == [64, 68]
    built.close()


def test_a_step_runs_where_it_was_submitted_to_though_the_share_changes_before_it_is_enqueued(built: Built) -> None:
    gate = threading.Event()
    built.device.give(1)
    held = built.lanes[False].submit(lambda: gate.wait(WAIT_S))
    behind = built.lanes[False].submit(lambda: current[-1])
    built.device.give(3)
    gate.set()
    reach(2)
    assert held.result() and len(behind.result().sms) == 100  # type: ignore[attr-defined]


def test_a_step_in_another_place_waits_for_the_one_before(built: Built) -> None:
    streams = []
    for parts in (0, 1, 1, 0):
        built.device.give(parts)
        streams.append(built.where(decodes=False))
    whole, first = streams[:2]
    assert streams == [whole, first, first, whole]
    assert first.waited == [events[0]] and whole.waited == [events[2]]


def test_graphs_are_recorded_on_each_of_the_lane_s_streams_and_a_step_replays_its_own(built: Built) -> None:
    """A graph's kernels keep the SMs and the priority of the stream that they were recorded on."""
    counted: list[tuple[int | None, int | None]] = []
    for decodes in (True, False):
        counted.clear()
        capture = built.records[decodes].capture
        assert capture is not None

        def work() -> object:
            counted.append((sm_limit(), torch._C._get_sm_carveout_experimental()))
            return current[-1]

        replays = [capture().capture(work) for _ in range(2)]  # new weights are recorded again
        divided = [(32, 100), (64, 68), (96, 36)] if decodes else [(100, 32), (68, 64), (36, 96)]
        once = [sms for sms in [(None, None), *divided] for _ in range(1 + WARM_UP_RUNS)]
        assert counted == once * 2
        for parts in (2, 0, 3):
            built.device.give(parts)
            for replay in replays:
                before = len(events)
                enqueued = built.lanes[decodes].submit(lambda replay=replay: (replay(), current[-1]))  # type: ignore[misc]
                reach(before + 1)
                recorded, running = enqueued.result()
                assert recorded is running is built.where(decodes=decodes)


def test_graphs_that_a_step_records_count_on_the_sms_of_their_own_partition(built: Built) -> None:
    """New weights may come while the lanes divide the GPU."""
    counted: list[tuple[int | None, int | None]] = []
    capture = built.records[True].capture
    assert capture is not None
    built.device.give(2)
    before = len(events)

    def record() -> None:
        capture().capture(lambda: counted.append((sm_limit(), torch._C._get_sm_carveout_experimental())))
        counted.append((sm_limit(), torch._C._get_sm_carveout_experimental()))

    enqueued = built.lanes[True].submit(record)
    reach(before + 1)
    enqueued.result()
    assert counted[:: 1 + WARM_UP_RUNS] == [(None, None), (32, 100), (64, 68), (96, 36), (64, 68)]


def test_kernels_that_are_launched_count_on_the_sms_of_the_lane(built: Built) -> None:
    built.device.give(1)
    before = len(events)
    enqueued = built.lanes[False].submit(lambda: (sm_limit(), torch._C._get_sm_carveout_experimental()))
    reach(before + 1)
    assert enqueued.result() == (100, 32)
    assert torch._C._get_sm_carveout_experimental() is None and sm_limit() is None


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("bindings", "'cuda'.*install cuda-bindings"),
        ("broken", "cuGreenCtxCreate says CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"),
        ("missing", 'cuGreenCtxCreate: Function "cuGreenCtxCreate" not found'),
    ],
)
def test_a_gpu_that_cannot_be_divided_has_priorities_and_one_line_that_says_why(
    lacks: str, said: str, gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if lacks != "bindings":
        setattr(driver, lacks, "cuGreenCtxCreate")
    else:
        monkeypatch.setitem(sys.modules, "cuda", None)
        for name in ("cuda.bindings", "cuda.bindings.driver"):
            monkeypatch.delitem(sys.modules, name)
    built = Built()
    assert [built.where(decodes=decodes).priority for decodes in (True, False)] == [-1, 0]
    built.device.give(1)
    assert not hasattr(built.where(decodes=False), "sms") and built.device.parts == 1
    [line] = [record.getMessage() for record in caplog.records]
    assert re.search(f"^PD multiplexing: decodes have priority over prompts, but no SMs of their own: .*{said}$", line)
    built.close()


def test_a_gpu_with_few_sms_is_not_divided(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    install(monkeypatch, Driver(num_sms=14))
    built = Built()
    assert (built.device.parts, built.streams) == (1, 1)
    built.close()


# ---- the division, and the memory that it takes

GPUS = {
    "P100": (56, 6),
    "V100": (80, 7),
    "T4": (40, 7),
    "A100": (108, 8),
    "L4": (58, 8),
    "H200": (132, 9),
    "B200": (148, 10),
}


@pytest.mark.parametrize(("num_sms", "major"), GPUS.values(), ids=GPUS)
def test_quarters_of_gpus(num_sms: int, major: int) -> None:
    grain = grain_of(major)
    found = divisions(num_sms, grain, parts=4)
    assert all(abs(sms - num_sms * part / 4) <= grain.step / 2 for part, sms in enumerate(found, 1)) and len(found) == 3


@given(num_sms=st.integers(1, 300), major=st.integers(6, 12), parts=st.integers(2, 8))
def test_divisions_leave_both_phases_what_a_context_needs(num_sms: int, major: int, parts: int) -> None:
    grain = grain_of(major)
    found = divisions(num_sms, grain, parts=parts)
    assert found == sorted(set(found)) and len(found) < parts
    assert all(sms % grain.step == 0 and min(sms, num_sms - sms) >= grain.least for sms in found)
    assert found or num_sms < 2 * grain.least + grain.step * parts


def test_memory_of_both_lanes_counts_each_stream() -> None:
    one = replace(unmeasured(1000, 100), prompts=20, token_bytes=2.0, samples=5, graphs=7)
    assert one.at_once(1) == replace(one, prompts=25)
    assert one.at_once(4) == replace(one, prompts=85, token_bytes=8.0, graphs=28)
