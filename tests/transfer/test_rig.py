"""The rig ends what it starts, also when that does not start."""

import subprocess

import pytest

from tests.transfer.rig import ChildWorker


def test_a_child_that_does_not_start_leaves_neither_files_nor_a_process(monkeypatch: pytest.MonkeyPatch):
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def starts(*args: object, **options: object) -> "subprocess.Popen[str]":
        started.append(popen(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", starts)
    with pytest.raises(EOFError, match="ended with status 1"):
        ChildWorker(role="decode", backend="fake", pool={})
    (process,) = started
    assert process.returncode == 1
    assert process.stdin is not None and process.stdin.closed
    assert process.stdout is not None and process.stdout.closed
