"""Random numbers nobody can foretell, drawn from the system in blocks: a system call for each would cost more than all else."""

import os

BLOCK_BYTES = 4096


class Entropy:
    """Rooms and request ids come from here."""

    def __init__(self) -> None:
        self._block = b""
        self._at = 0

    def bits(self, num_bits: int) -> int:
        """A random integer in [0, 2**num_bits)."""
        num_bytes = (num_bits + 7) // 8
        return int.from_bytes(self._take(num_bytes), "little") >> (8 * num_bytes - num_bits)

    def name(self) -> str:
        """32 hexadecimal digits."""
        return self._take(16).hex()

    def _take(self, num_bytes: int) -> bytes:
        assert 0 < num_bytes <= BLOCK_BYTES, num_bytes
        if self._at + num_bytes > len(self._block):
            self._block, self._at = os.urandom(BLOCK_BYTES), 0
        taken = self._block[self._at : self._at + num_bytes]
        self._at += num_bytes
        return taken
