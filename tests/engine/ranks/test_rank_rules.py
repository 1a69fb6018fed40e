"""What a worker of several ranks refuses at start, by name. What works: test_rank_features.py."""

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.flags.rank_rules import check_ranks
from engine.model_files.model_config import WIDE_MODEL_PATH, load_model_config
from service.flags import ConfigError
from tests.models.tiny_checkpoints import make_tiny_checkpoint

EVENTS = '{"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}'
NODES = {"nnodes": 2, "dist_init_addr": "127.0.0.1:1"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 3}, "--tp-size 3: does not divide the model's 8 attention heads; choose 1, 2, 4 or 8"),
    ({"tp_size": 2, "ep_size": 2}, "--ep-size 2: the model has no experts; leave it out"),
    ({"enable_eplb": True}, "--enable-eplb: --ep-size 1 gives each rank a part of every expert; give --ep-size"),
    ({"init_expert_location": "x.json"}, "--init-expert-location: --ep-size 1"),
    ({"pp_size": 2, "stream": "inline"}, "--stream inline: --pp-size 2 computes several steps at once"),
    (
        {"tp_size": 2, **NODES, "hicache_storage_dir": "/tmp/x"},
        "--hicache-storage-dir: the files of all 2 ranks lie on one machine, --nnodes is 2",
    ),
    (
        {"dp_size": 2, "kv_events_config": EVENTS},
        "--kv-events-config: each of 2 DP ranks .* counted from 5557 and 5558; choose ports that are 2 or more apart",
    ),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_what_does_not_work_is_refused_by_name(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_ranks(EngineConfig(model_path=WIDE_MODEL_PATH, **flags), load_model_config(WIDE_MODEL_PATH))


def test_ports_of_events_that_are_free_or_apart_are_taken() -> None:
    for events in (EVENTS.replace("5558", "5559"), EVENTS.replace("5558", "*"), EVENTS.replace("5557", "0")):
        config = EngineConfig(model_path=WIDE_MODEL_PATH, dp_size=2, kv_events_config=events)
        check_ranks(config, load_model_config(WIDE_MODEL_PATH))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"tp_size": 4, "ep_size": 2},
            "--ep-size 2: each rank holds whole experts, or a part of .*; give --tp-size, 4, or 1",
        ),
        (
            {"tp_size": 4, "ep_size": 4, "ep_num_redundant_experts": 3},
            "--ep-num-redundant-experts 3: with the model's 8 experts these are 11, which --ep-size 4 does not divide; give 4",
        ),
        ({"ep_size": 2}, "--ep-size 2: .*give --tp-size, 1, or 1"),
        ({"tp_size": 3, "ep_size": 3}, "--ep-size 3: does not divide the model's 8 experts; choose 1, 2, 4 or 8"),
    ],
)
def test_ranks_that_cannot_hold_whole_experts_are_refused(tmp_path: Path, flags: dict[str, Any], said: str) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(ConfigError, match=said):
        check_ranks(EngineConfig(model_path=path, **flags), load_model_config(path))


def test_adapters_over_stages_of_a_mixture_are_refused(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "glm4_moe")
    config, model = EngineConfig(model_path=path, pp_size=2, enable_lora=True), load_model_config(path)
    with pytest.raises(
        ConfigError,
        match="--enable-lora: --pp-size 2 gives stages of a model with experts or recurrent states unlike layers",
    ):
        check_ranks(config, model)
    with pytest.raises(ConfigError, match=r"--tp-size 16: .*choose 1, 2 or 4"):
        check_ranks(EngineConfig(model_path=path, tp_size=16), model)
