"""Memory of packed matrices: pieces lie behind each other, never on each other, and go with the last of them."""

import mmap

import torch

from engine.kernels import tape
from engine.kernels.tape import HUGE_BYTES, LINE_BYTES, RUN_BYTES, PackedMemory, Staging

SIZES = [1, 64, 1000, HUGE_BYTES - 1, HUGE_BYTES, 3 * HUGE_BYTES + 7, RUN_BYTES // 2, RUN_BYTES, RUN_BYTES + 1]


def test_pieces_are_aligned_and_apart() -> None:
    memory = PackedMemory()
    pieces = [memory.allocate(size) for size in SIZES * 3]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    for number, (piece, size) in enumerate(zip(pieces, SIZES * 3, strict=True)):
        assert len(piece) == size and piece.data_ptr() % LINE_BYTES == 0
        assert (piece == number).all()


def test_small_matrices_share_huge_pages() -> None:
    memory = PackedMemory()
    first, second = memory.allocate(1000), memory.allocate(HUGE_BYTES)
    assert first.data_ptr() % HUGE_BYTES == 0
    assert second.data_ptr() == first.data_ptr() + -(-1000 // LINE_BYTES) * LINE_BYTES


def test_a_run_goes_with_the_last_of_its_pieces() -> None:
    memory = PackedMemory()
    pieces = [memory.allocate(RUN_BYTES // 2) for _ in range(3)]  # two runs
    assert pieces[0].untyped_storage().data_ptr() == pieces[1].untyped_storage().data_ptr()
    mapped = _mapped_bytes()
    del pieces[0], pieces[0]
    assert _mapped_bytes() <= mapped - RUN_BYTES


def _mapped_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE


# ---- Memory of tensors that are dropped comes again, and that of those that stay does not.

CPU = torch.device("cpu")
SHAPE = (1024, HUGE_BYTES // 1024)


def test_the_memory_of_a_dropped_tensor_comes_again_for_its_size() -> None:
    own = Staging()
    first = own.empty(SHAPE, dtype=torch.bfloat16, device=CPU)
    at = first.data_ptr()
    assert first.shape == SHAPE and first.dtype == torch.bfloat16 and first.is_contiguous() and at % HUGE_BYTES == 0
    del first
    other = own.empty((3 * HUGE_BYTES,), dtype=torch.uint8, device=CPU)
    again = own.empty((2, HUGE_BYTES), dtype=torch.uint8, device=CPU)
    assert again.data_ptr() == at != other.data_ptr()


def test_a_tensor_that_stays_keeps_its_memory_and_so_does_a_view_of_it() -> None:
    own = Staging()
    kept = own.empty(SHAPE, dtype=torch.bfloat16, device=CPU).fill_(1)
    row = own.empty(SHAPE, dtype=torch.bfloat16, device=CPU).fill_(2)[5]
    for _ in range(3):
        own.empty(SHAPE, dtype=torch.bfloat16, device=CPU).fill_(3)
    own.close()
    assert bool((kept == 1).all()) and bool((row == 2).all())


def test_what_is_kept_for_later_is_bounded_and_ends_with_the_checkpoint(monkeypatch) -> None:
    monkeypatch.setattr(tape, "MAX_FREE_BYTES", 3 * HUGE_BYTES)
    own = Staging()
    for size in (2, 3, 1):
        own.empty((size * HUGE_BYTES,), dtype=torch.uint8, device=CPU)
    assert own._free_bytes == 3 * HUGE_BYTES == sum(size * len(free) for size, free in own._free.items())
    own.close()
    assert not own._free and own._free_bytes == 0


def test_several_tensors_of_a_size_come_again() -> None:
    own = Staging()
    first = [own.empty(SHAPE, dtype=torch.bfloat16, device=CPU) for _ in range(3)]
    at = {x.data_ptr() for x in first}
    first.clear()
    again = [own.empty(SHAPE, dtype=torch.bfloat16, device=CPU) for _ in range(3)]
    assert {x.data_ptr() for x in again} == at and len(at) == 3


def test_a_small_tensor_is_a_plain_one() -> None:
    own = Staging()
    own.empty((8,), dtype=torch.float32, device=CPU)
    assert not own._free
