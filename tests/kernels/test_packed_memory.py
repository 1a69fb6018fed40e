"""Memory of packed matrices: pieces lie behind each other, never on each other, and go with the last of them."""

import mmap

from engine.kernels.packed_memory import HUGE_BYTES, LINE_BYTES, RUN_BYTES, PackedMemory

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
