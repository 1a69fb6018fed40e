"""The pool of recurrent states: slots do not overlap, copies run in their order, and slot 0 has no owner."""

import torch

from engine.core.plan import StateCopy
from engine.kv.state_pool import StatePool, StateSpec, StateTable

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


def test_copies_run_in_their_order() -> None:
    pool = StatePool(SPECS, num_slots=3, device="cpu")
    for slot in range(1, 4):
        pool.recurrent(0)[slot], pool.conv(1)[slot] = slot, slot
    pool.run([StateCopy(1, 2), StateCopy(3, 1), StateCopy(None, 3)])
    assert [pool.recurrent(0)[slot].unique().tolist() for slot in (1, 2, 3)] == [[3.0], [1.0], [0.0]]
    assert [pool.conv(1)[slot].unique().tolist() for slot in (1, 2, 3)] == [[3.0], [1.0], [0.0]]


def test_rows_without_a_request_have_the_scratch_slot() -> None:
    table = StateTable(num_rows=2, device=torch.device("cpu"))
    table.open(1, 5)
    table.open(0, 3)
    assert table.rows[torch.tensor([1, 0, 2])].tolist() == [5, 3, 0] and table.rows.dtype == torch.int32
