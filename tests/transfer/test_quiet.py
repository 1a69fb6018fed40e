"""Output that engine libraries print at their start is dropped, and nothing else, also when ranks of one process start at once."""

import contextlib
import os
from pathlib import Path

import pytest

from transfer_backends.engines.environment import quiet


@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_a_file_has_all_but_what_overlapping_blocks_drop(tmp_path: Path, first_leaves_first: bool) -> None:
    path = tmp_path / "out"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    with contextlib.closing(os.fdopen(fd, "wb", buffering=0)) as out:
        out.write(b"before ")
        first, second = quiet(fd), quiet(fd)
        first.__enter__()
        second.__enter__()
        out.write(b"dropped ")
        for block in (first, second) if first_leaves_first else (second, first):
            out.write(b"dropped, too ")
            block.__exit__(None, None, None)
        out.write(b"after")
    assert path.read_bytes() == b"before after"
