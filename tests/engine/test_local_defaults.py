"""Defaults from the machine: threads by what a checkpoint is worth and the operator allows, and a seed of its own."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, ServerConfig
from engine.flags.local_defaults import (
    BYTES_A_THREAD,
    default_threads,
    with_frontends,
    with_random_seed,
    with_threads,
)
from service.waiter import usable_cores
from tests.models.tiny_checkpoints import make_tiny_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for part in ("model-1.safetensors", "model-2.safetensors"):
        with (tmp_path / part).open("wb") as file:
            file.truncate(3 * BYTES_A_THREAD // 2)  # sparse
    return tmp_path


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (64, 3)])
def test_one_a_core_but_no_more_than_the_weights_are_worth(checkpoint: Path, cores: int, threads: int) -> None:
    assert default_threads(str(checkpoint), cores=cores) == threads


def test_a_small_model_has_one(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"small")
    assert default_threads(str(tmp_path), cores=64) == 1
    assert default_threads(str(tmp_path / "missing"), cores=64) == 1  # the load will say what is wrong


def test_made_up_weights_count_as_config_json_describes_them(tmp_path: Path) -> None:
    """A vocabulary of 2^20 and a hidden size of 64: embedding and head take 128 MiB each in two bytes a weight."""
    make_tiny_checkpoint(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "config.json"
    assert default_threads(str(tmp_path), cores=64) == 1
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 1 << 20}))
    assert default_threads(str(tmp_path), cores=64) == 4


@pytest.mark.parametrize(("asked", "cores"), [("3", 3), ("5,2", 5), ("0", None), ("many", None), ("", None)])
def test_the_operator_s_environment_comes_before_the_machine(
    asked: str, cores: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert usable_cores() == (cores or len(os.sched_getaffinity(0)))


def test_a_flag_comes_before_all(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    config = EngineConfig(model_path=str(checkpoint))
    assert with_threads(config).num_threads == 2
    for dp_size, threads in ((2, 1), (5, 1)):
        assert with_threads(replace(config, dp_size=dp_size)).num_threads == threads, "ranks divide cores"
    assert with_threads(EngineConfig(model_path=str(checkpoint), num_threads=7)).num_threads == 7


def test_the_seed_comes_from_outside_once() -> None:
    drawn = with_random_seed(EngineConfig(), bits=lambda k: k + 1)
    assert drawn.random_seed == 32 and with_random_seed(drawn) is drawn


def test_an_explicit_seed_stays() -> None:
    assert [with_random_seed(EngineConfig(random_seed=seed)).random_seed for seed in (0, 7)] == [0, 7]


@pytest.mark.parametrize(
    ("on_gpu", "engine", "server", "frontends"),
    [
        (True, {}, {}, 2),
        (True, {"max_running_requests": 128}, {}, 2),
        (True, {"max_running_requests": 127}, {}, 1),
        (True, {"max_running_requests": 64, "dp_size": 2}, {}, 2),
        (False, {"max_running_requests": 500}, {}, 1),
        (True, {"random_seed": 0}, {}, 1),  # several frontends do not repeat a run
        (True, {}, {"tokenizer_worker_num": 1}, 1),
        (False, {}, {"tokenizer_worker_num": 5}, 5),
    ],
)
def test_many_streams_of_a_gpu_have_two_frontends(
    on_gpu: bool, engine: dict[str, Any], server: dict[str, Any], frontends: int
) -> None:
    given = ServerConfig(**server), EngineConfig(**engine)
    assert with_frontends(*given, needs_one=False, on_gpu=on_gpu).num_frontends == frontends
    if not server:
        assert with_frontends(*given, needs_one=True, on_gpu=on_gpu).num_frontends == 1
