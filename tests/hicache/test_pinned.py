"""Pinned memory: as large as asked, touched before it is registered, given back once."""

import pytest

from engine.kv.pinned import PinnedBytes
from tests.engine.test_prefault import HUGE_PAGE, resident

ODD_BYTES = 3 * HUGE_PAGE + 4096 * 5 + 64  # no power of two


class RegistrarInATest:
    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, address: int, size_bytes: int) -> None:
        assert address not in self.registered
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]


def test_the_size_asked_is_mapped_and_registered_and_unregistered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kv.pinned.PART_BYTES", HUGE_PAGE)
    registrar = RegistrarInATest()
    pinned = PinnedBytes(ODD_BYTES, registrar=registrar, threads=2)
    assert pinned.tensor.numel() == pinned.tensor.untyped_storage().nbytes() == ODD_BYTES
    assert registrar.registered == {pinned.tensor.data_ptr(): ODD_BYTES}
    assert resident(pinned.tensor) == {True}
    assert not pinned.tensor.any()
    pinned.close()
    pinned.close()
    assert registrar.registered == {}


def test_a_refused_registration_is_raised() -> None:
    class Refusing(RegistrarInATest):
        def register(self, address: int, size_bytes: int) -> None:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        PinnedBytes(4096, registrar=Refusing(), threads=1)
