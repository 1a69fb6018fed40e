"""Fixtures for folders whose tests compute with torch."""

import threading
from collections.abc import Iterator

import pytest
import torch

from engine.kernels.tape import Tape

Plays = list[tuple[threading.Thread, Tape]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: on a shared machine, more threads than free cores are many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def plays(monkeypatch: pytest.MonkeyPatch) -> Plays:
    """The tapes that are played, in order, each with its thread."""
    played, play = Plays(), Tape.play

    def noted(tape: Tape) -> None:
        played.append((threading.current_thread(), tape))
        play(tape)

    monkeypatch.setattr(Tape, "play", noted)
    return played
