"""C kernels on a CPU that this machine is not: each call is carried to a program under QEMU, and what it wrote comes back.

Python's side of a kernel stays as it is: a `Guest` stands in for its library. It learns where tensors lie by watching
`Tensor.data_ptr` and `ctypes.addressof`, so pointers in arguments can be moved.
"""

import bisect
import ctypes
import hashlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engine.kernels import build as build_module
from engine.kernels import tape

KERNELS = Path(build_module.__file__).with_name("csrc")
DRIVER = Path(__file__).with_suffix(".c")
BASE_FLAGS = ("-O1", "-std=gnu11", "-static", "-fno-math-errno", "-Wno-psabi", "-pthread", f"-I{KERNELS}")
LINE, WHOLE_BYTES = 64, 4 << 20  # of a small storage all is carried


class Target(NamedTuple):
    """`kind`: as the C side says it is."""

    compiler: str
    flags: tuple[str, ...]
    emulator: tuple[str, ...]


class Extent(NamedTuple):
    begin: int
    end: int
    keeps: Any
    is_structure: bool


class Memory:
    """What pointers may point at. It stays alive as long as this object."""

    def __init__(self) -> None:
        self._extents: dict[tuple[int, int], Extent] = {}

    def note_tensor(self, tensor: torch.Tensor, address: int) -> None:
        storage = tensor.untyped_storage()
        begin = address - tensor.storage_offset() * tensor.itemsize
        end = begin + storage.nbytes()
        if storage.nbytes() > WHOLE_BYTES:
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            begin, end = address, address + (last + 1) * tensor.itemsize
        if end > begin:
            self._extents[begin, end] = Extent(begin, end, storage, False)

    def note_structure(self, structure: Any, address: int) -> None:
        end = address + ctypes.sizeof(structure)
        self._extents[address, end] = Extent(address, end, structure, True)

    def regions(self) -> list[Extent]:
        """Without overlap, in order of address."""
        merged: list[Extent] = []
        for one in sorted(self._extents.values(), key=lambda extent: extent[:2]):
            if merged and one.begin < merged[-1].end:
                last = merged.pop()
                one = Extent(last.begin, max(last.end, one.end), (last.keeps, one.keeps), last.is_structure)
            merged.append(one)
        return merged


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    memory, data_ptr, address_of = Memory(), torch.Tensor.data_ptr, ctypes.addressof

    def watched_pointer(tensor: torch.Tensor) -> int:
        address = data_ptr(tensor)
        memory.note_tensor(tensor, address)
        return address

    def watched_address(structure: Any) -> int:
        memory.note_structure(structure, address_of(structure))
        return address_of(structure)

    call_once = tape.call_once

    def carried(kernel: Any, args: ctypes.Structure) -> int:
        return kernel(ctypes.byref(args)) if isinstance(kernel, Function) else call_once(kernel, args)

    with monkeypatch.context() as patch:
        patch.setattr(tape, "call_once", carried)
        patch.setattr(torch.Tensor, "data_ptr", watched_pointer)
        patch.setattr(ctypes, "addressof", watched_address)
        yield memory


def build(source: Path, target: Target, folder: Path, own_flags: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """The program in `folder`, made where it is not there yet, and its functions in order."""
    functions = re.findall(r"^(?:int|void) (tandem_\w+)\(", source.read_text(), re.MULTILINE)
    listed = " ".join(f"F({name})" for name in functions)
    command = [target.compiler, *BASE_FLAGS, *own_flags, *target.flags, f"-DFUNCTIONS={listed}"]
    texts = [path.read_text() for path in (DRIVER, source, KERNELS / "team.c", *sorted(KERNELS.rglob("*.h")))]
    program = (
        folder / f"guest-{source.stem}-{hashlib.sha256(chr(0).join([*texts, *command]).encode()).hexdigest()[:20]}"
    )
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / "program"
            done = subprocess.run(
                [*command, "-o", made, DRIVER, source, "-lm"], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            made.replace(program)
    return program, functions


class Guest:
    """Stands in for a ctypes library. `close` ends the program."""

    def __init__(self, program: Path, functions: list[str], target: Target, memory: Memory) -> None:
        self._functions, self._memory = functions, memory
        self._process = subprocess.Popen(
            [*target.emulator, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def __getattr__(self, name: str) -> "Function":
        function = Function(self, self._functions.index(name))
        setattr(self, name, function)
        return function

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def call(self, function: int, args: Sequence[Any]) -> int:
        values: list[int] = []
        for arg in args:
            structure = getattr(arg, "_obj", arg)  # of byref
            values.append(structure if isinstance(structure, int) else ctypes.addressof(structure))
        regions, moves, places = self._reached(values)
        spots = [places(value) or (-1, value) for value in values]
        head = [function, len(values), len(regions), len(moves)]
        numbers = [*head, *(n for spot in spots for n in spot)]
        numbers += [n for region in regions for n in (region.end - region.begin, region.begin % LINE)]
        numbers += [n for move in moves for n in move]
        sent = [struct.pack(f"<{len(numbers)}q", *numbers)]
        sent += [ctypes.string_at(region.begin, region.end - region.begin) for region in regions]
        assert self._process.stdin is not None
        for part in sent:
            self._write(part)
        (result,) = struct.unpack("<q", self._read(8))
        for region in regions:
            came = self._read(region.end - region.begin)
            if not region.is_structure:
                ctypes.memmove(region.begin, came, len(came))
        return int(result)

    def _reached(self, values: Sequence[int]) -> tuple[list[Extent], list[tuple[int, int, int, int]], Any]:
        """The regions that the arguments lead to, and the pointers in them."""
        extents = self._memory.regions()
        begins = [extent.begin for extent in extents]
        chosen: list[Extent] = []
        moves: list[tuple[int, int, int, int]] = []

        def place(value: int) -> tuple[int, int] | None:
            at = bisect.bisect_right(begins, value) - 1
            if at < 0 or value >= extents[at].end:
                return None
            if extents[at] not in chosen:
                chosen.append(extents[at])
            return chosen.index(extents[at]), value - extents[at].begin

        for value in values:
            place(value)
        done = 0
        while done < len(chosen):
            extent = chosen[done]
            if extent.is_structure:
                for offset in range(0, extent.end - extent.begin - 7, 8):
                    found = place(ctypes.c_uint64.from_address(extent.begin + offset).value)
                    if found:
                        moves.append((done, offset, *found))
            done += 1
        return chosen, moves, place

    def _write(self, part: bytes) -> None:
        view = memoryview(part)
        while view:
            view = view[self._process.stdin.write(view) :]  # type: ignore[union-attr]

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._process.stdout.read(size - len(parts))  # type: ignore[union-attr]
            assert part, f"the guest ended: {self._process.wait()}"
            parts += part
        return bytes(parts)


class Function:
    def __init__(self, guest: Guest, index: int) -> None:
        self._guest, self._index = guest, index
        self.argtypes: list[Any] = []
        self.restype: Any = None

    def __call__(self, *args: Any) -> int:
        return self._guest.call(self._index, args)
