"""What a mark says is true: at that moment the pool holds these layers of the step, and none of the later ones."""

import itertools

import pytest
import torch

from disagg.layerwise import MIN_PIECE_BYTES, groups_of
from engine.executor.layer_marks import LayerMarks
from engine.model_files.model_config import DEFAULT_MODEL_PATH
from tests.attention.attention_cases import by_no_angle
from tests.engine.engine_in_process import EngineInProcess

PROMPT = list(range(16, 80))


@pytest.mark.parametrize("stream", ["inline", "threaded"])
def test_a_mark_is_set_when_its_layers_are_written(stream: str) -> None:
    engine = EngineInProcess(DEFAULT_MODEL_PATH, stream=stream)
    pool, marks = engine.parts.pool, engine.parts.device.layers
    layers, seen = range(pool.num_layers), list[tuple[int, list[bool]]]()

    def look() -> None:
        """Which layers of any page hold something; the pool is new, and zero."""
        pages = pool.buffer.view(1 + pool.num_pages, -1)
        cuts = [0, *pool.layer_ends()]
        seen.append((marks.reached()[1], [bool(pages[:, a:b].any()) for a, b in itertools.pairwise(cuts)]))

    marks.watch([layer + 1 for layer in layers], look)
    try:
        engine.answer("r", PROMPT, max_new_tokens=1)
    finally:
        engine.close()
    assert seen == [(done, [layer < done for layer in layers]) for done in range(len(layers) + 1)]


def test_without_a_watcher_nothing_is_marked_and_layers_end_where_the_pool_says() -> None:
    with EngineInProcess(DEFAULT_MODEL_PATH) as engine:
        engine.answer("r", PROMPT, max_new_tokens=2)
        assert engine.parts.device.layers.reached() == (-1, 0) and not engine.parts.device.layers.ahead
        pool = engine.parts.pool
        base = pool.k(0)[0].data_ptr()
        begins = [pool.k(layer)[0].data_ptr() - base for layer in range(pool.num_layers)]
        assert [0, *pool.layer_ends()][:-1] == begins and pool.layer_ends()[-1] == pool.page_bytes


@pytest.mark.parametrize(
    ("asked", "page_bytes", "ends"),
    [
        ("off", 1 << 20, []),
        ("auto", MIN_PIECE_BYTES, []),
        ("auto", 4 * MIN_PIECE_BYTES, [7, 14, 21, 28]),
        ("auto", 1 << 24, [3, 7, 10, 14, 17, 21, 24, 28]),
        ("on", 28 * 64, [3, 7, 10, 14, 17, 21, 24, 28]),
    ],
)
def test_where_pages_are_cut(asked: str, page_bytes: int, ends: list[int]) -> None:
    layer_ends = [page_bytes * (layer + 1) // 28 for layer in range(28)]
    groups = groups_of(layer_ends, mode=asked)
    assert [group.end_layer for group in groups] == ends
    assert [group.end_byte for group in groups] == [layer_ends[end - 1] for end in ends]
    assert groups_of(layer_ends[:1], mode="on")[0].end_layer == 1


def test_marks_on_cuda_wait_for_their_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of a fake device: a mark counts once the device has reached it, in order."""
    passed: set[int] = set()

    class Event:
        made = 0

        def record(self) -> None:
            self.number, Event.made = Event.made, Event.made + 1

        def query(self) -> bool:
            return self.number in passed

    monkeypatch.setattr(torch.cuda, "Event", Event)
    marks, new = LayerMarks(torch.device("cuda")), by_no_angle(*[torch.ones(1, 1, 2)] * 3)
    marks.watch([1, 2], lambda: None)
    attend = marks.attend(4, lambda layer, new: new.qkv)
    for layer in range(2):
        attend(layer, new)
    assert marks.reached() == (-1, 0) and marks.ahead
    passed.update((0, 2))
    assert marks.reached() == (4, 0) and marks.ahead
    passed.add(1)
    assert marks.reached() == (4, 2) and not marks.ahead
