"""The pool of recurrent states: slots do not overlap, copies run in their order, and slot 0 has no owner."""

import pytest
import torch

from engine.core.plan import StateCopy
from engine.kv.cache_spec import StateShard
from engine.kv.state_pool import StatePool, StateSpec

SPECS = [StateSpec((5, 3), (2, 3, 7), "bfloat16"), StateSpec((4, 3), (6,), "float32")]


def test_each_layer_has_its_own_bytes_of_each_slot() -> None:
    pool = StatePool(SPECS, num_slots=3, device="cpu")
    views = [view for layer in range(2) for view in (pool.conv(layer), pool.recurrent(layer))]
    assert [tuple(view.shape) for view in views] == [(4, 5, 3), (4, 2, 3, 7), (4, 4, 3), (4, 6)]
    assert [view.dtype for view in views] == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
    assert not any(view.any() for view in views), "a new slot is zero"
    for number, view in enumerate(views):
        for slot in range(4):
            view[slot] = 10 * number + slot
    for number, view in enumerate(views):
        assert [view[slot].unique().tolist() for slot in range(4)] == [[10.0 * number + slot] for slot in range(4)]
    assert pool.buffer.numel() == 4 * pool.slot_bytes and pool.slot_bytes % 64 == 0
    assert pool.conv(0)[2].data_ptr() == pool.base_ptr + 2 * pool.slot_bytes


def test_shadows_lie_behind_all_slots() -> None:
    """So peers and the host's copies, which know the slots alone, find these where they are without."""
    pool, plain = (StatePool(SPECS, num_slots=3, num_shadows=count, device="cpu") for count in (2, 0))
    assert pool.buffer.numel() == 6 * pool.slot_bytes and pool.slot_bytes == plain.slot_bytes
    assert pool.slots.shape == plain.slots.shape == (4, pool.slot_bytes)
    pool.recurrent(1)[3] = 5.0
    pool.run([StateCopy(3, pool.shadow(1)), StateCopy(None, 3)])
    assert pool.recurrent(1)[5].eq(5).all() and not pool.slots.any()
    with pytest.raises(AssertionError):
        pool.shadow(2)


def test_copies_run_in_their_order() -> None:
    pool = StatePool(SPECS, num_slots=3, device="cpu")
    for slot in range(1, 4):
        pool.recurrent(0)[slot], pool.conv(1)[slot] = slot, slot
    pool.run([StateCopy(1, 2), StateCopy(3, 1), StateCopy(None, 3)])
    assert [pool.recurrent(0)[slot].unique().tolist() for slot in (1, 2, 3)] == [[3.0], [1.0], [0.0]]
    assert [pool.conv(1)[slot].unique().tolist() for slot in (1, 2, 3)] == [[3.0], [1.0], [0.0]]


def test_runs_name_the_bytes_of_the_models_state() -> None:
    """Of two ranks the second, with two of four parts of 2 channels and heads 2 and 3: what lies there is what the model has there."""
    held = StateShard((range(2, 4), range(6, 8)), 8, range(2, 4), 4)
    whole = [StateSpec((8, 3), (4, 2, 3), "float32")] * 3
    here = [StateSpec((4, 3), (2, 2, 3), "float32", held)] * 2
    model, pool = StatePool(whole, num_slots=1, device="cpu"), StatePool(here, num_slots=1, device="cpu")
    numbers = iter(range(1, 1 + 3 * (8 * 3 + 4 * 6)))
    flat = []
    for layer in range(3):
        for view in (model.conv(layer)[1], model.recurrent(layer)[1]):
            view.copy_(torch.tensor([next(numbers) for _ in range(view.numel())]).view(view.shape))
            flat.append(view.flatten())
    for layer in (1, 2):
        conv, recurrent = model.conv(layer)[1], model.recurrent(layer)[1]
        pool.conv(layer - 1)[1] = torch.cat([conv[2:4], conv[6:8]])
        pool.recurrent(layer - 1)[1] = recurrent[2:4]
    state, slot = torch.cat(flat).view(torch.uint8), pool.buffer.view(2, -1)[1]
    runs = pool.runs(range(1, 3))
    for begin, at, size in runs:
        assert torch.equal(state[begin : begin + size], slot[at : at + size])
    assert sum(size for _, _, size in runs) * 2 == 2 * len(state) // 3 and runs == sorted(runs)
    assert 3 * whole[0].whole_bytes == len(state) and here[0].whole_bytes == whole[0].whole_bytes
