"""Decode steps as tapes: the same bits as without, for every batch size and after a change of weights; and a model of which
a tape would not know everything is found out."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.executor.decode_tapes import DecodeTapes
from engine.kernels.linear import LinearKernel, PackedMatrix, linear_kernel
from engine.kernels.tape import TURNS, tape_library
from engine.models.load import load_model
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.three_requests import run, two_models
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.one_thread import Plays

LENGTHS = {"a": 13, "b": 4, "c": 9}  # three steps of three requests, five of two, four of one
PLAYS = 2 + 4 + 3  # of each size the first step is recorded
FLAGS: dict[str, Any] = {"dtype": "bfloat16", "max_running_requests": 4, "max_total_tokens": 512}
FLAGS["disable_radix_cache"] = True
KERNELS = [
    kernel for kernel in [linear_kernel()] if kernel is not None and tape_library() is not None
]  # one, or none here


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return two_models(tmp_path_factory.mktemp("models"), layers=3, hidden=64, intermediate=96)


@pytest.fixture
def start() -> Iterator[Callable[..., EngineInProcess]]:
    with contextlib.ExitStack() as stack:
        yield lambda path, **flags: stack.enter_context(EngineInProcess(path, **FLAGS, **flags))


@pytest.mark.parametrize("stream", ["inline", "threaded"])
def test_tokens_and_logprobs_are_the_same_to_the_bit(
    models: tuple[str, str], start: Callable[..., EngineInProcess], plays: Plays, stream: str
) -> None:
    expected, expected_of_other = (run(start(path, disable_cuda_graph=True), LENGTHS) for path in models)
    engine = start(models[0], stream=stream)
    tapes = engine.recorded(DecodeTapes)
    assert (tapes is not None) == bool(KERNELS)
    for again in (1, 2):
        assert run(engine, LENGTHS) == expected
        assert tapes is None or len(plays) == PLAYS + (again - 1) * (PLAYS + 3)
    other = load_model(models[1], engine.model, dtype="bfloat16", device="cpu", progress=False)
    engine.parts.weights.take(other, model_path=models[1], version=None)
    assert run(engine, LENGTHS) == expected_of_other != expected, "the tapes of other weights were played"


@pytest.mark.skipif(not KERNELS, reason="tapes hold calls of C kernels")
@pytest.mark.parametrize(
    "family", ["falcon_h1", "gemma2", "gemma3_text", "granite", "granitemoehybrid", "qwen3_5_text", "smollm3"]
)
def test_steps_of_families_with_arithmetic_of_their_own_are_played(
    family: str, tmp_path: Path, start: Callable[..., EngineInProcess], plays: Plays
) -> None:
    dense = {"num_local_experts": 0} if family == "granitemoehybrid" else {}
    path = make_tiny_checkpoint(tmp_path, family, dtype="bfloat16", head_dim=32, **dense)
    expected = run(start(path, disable_cuda_graph=True), LENGTHS)
    assert run(start(path), LENGTHS) == expected
    assert len(plays) == PLAYS


def test_the_flag_turns_them_off(models: tuple[str, str], start: Callable[..., EngineInProcess]) -> None:
    assert start(models[0], disable_cuda_graph=True).recorded(DecodeTapes) is None


class TwoProducts:
    """Two products, and what is done `between` them: enough of a DenseDecoder for a tape."""

    def __init__(self, matrix: PackedMatrix, between: Callable[[PackedMatrix, Tensor], Tensor]) -> None:
        self._matrix, self._between = matrix, between
        self.states = ()

    def begin(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor]:
        return (torch.outer(input_ids + 1.0, positions + 1.0)[:, :1].expand(-1, 32).bfloat16().contiguous(),)

    def keep_states(self) -> Callable[[], None]:
        return lambda: None

    def layers(self, begun: tuple[Tensor], attend: object) -> Tensor:
        return self._matrix.times(self._between(self._matrix, self._matrix.times(begun[0])))


def nothing(matrix: PackedMatrix, x: Tensor) -> Tensor:
    return x


def by_torch(matrix: PackedMatrix, x: Tensor) -> Tensor:
    return x.abs()


def held_for_long(matrix: PackedMatrix, x: Tensor) -> Tensor:
    """x is still to be used when its buffer's turn has come again."""
    for _ in range(TURNS):
        matrix.times(x)
    return x


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_number_of_threads_may_change_from_step_to_step(kernel: LinearKernel, plays: Plays) -> None:
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    model: Any = TwoProducts(kernel.pack(weight, None), nothing)
    tapes, nobody, before = DecodeTapes(), None, torch.get_num_threads()
    try:
        for n, threads in enumerate((1, 1, 3, 2, 1, 4)):
            torch.set_num_threads(threads)
            ids, positions = torch.tensor([n, 2 * n]), torch.tensor([n, n])
            found = tapes.forward(model, ids, positions, nobody)  # type: ignore[arg-type]
            torch.set_num_threads(1)
            assert torch.equal(found, model.layers(model.begin(ids, positions), nobody)), n
    finally:
        torch.set_num_threads(before)
    assert len(plays) == 5


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("between", "expected_plays"), [(nothing, 4), (by_torch, 1), (held_for_long, 1)])
def test_what_a_tape_does_not_know_is_found_out(
    kernel: LinearKernel,
    between: Callable[[PackedMatrix, Tensor], Tensor],
    expected_plays: int,
    plays: Plays,
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    model: Any = TwoProducts(kernel.pack(weight, None), between)
    tapes, nobody = DecodeTapes(), None
    for n in range(5):
        ids, positions = torch.tensor([n, 2 * n]), torch.tensor([n, n])
        found = tapes.forward(model, ids, positions, nobody)  # type: ignore[arg-type]
        assert torch.equal(found, model.layers(model.begin(ids, positions), nobody)), n
    assert len(plays) == expected_plays
    assert ("run without a tape" in caplog.text) == (expected_plays == 1)
