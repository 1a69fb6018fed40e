"""What --enable-pdmux changes, and what it refuses at start, each by the names of both flags."""

from pathlib import Path
from typing import Any

import pytest

from disagg.config import DisaggConfig
from disagg.role_session import plan_session
from engine.config import EngineConfig, ServerConfig
from engine.flags.pdmux import lane_share
from engine.flags.resolve import depth, limits, resolve
from engine.model_files.model_config import DEFAULT_MODEL_PATH, WIDE_MODEL_PATH, load_model_config
from service.flags import ConfigError
from tests.models.tiny_checkpoints import make_tiny_checkpoint

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"enable_mixed_chunk": True}, "not with --enable-mixed-chunk: "),
    ({"stream": "inline"}, "not with --stream inline: "),
    ({"tp_size": 2}, "not with --tp-size 2: "),
    ({"pp_size": 2}, "not with --pp-size 2: "),
    ({"enable_lora": True}, "not with --enable-lora: "),
    ({"lora_paths": ("a=/b",)}, "not with --lora-paths: "),
    ({"enable_hierarchical_cache": True}, "not with --enable-hierarchical-cache: "),
    ({"speculative_algorithm": "NGRAM"}, "not with --speculative-algorithm NGRAM: "),
]


def resolved(path: str = WIDE_MODEL_PATH, *, cuda: bool = False, **flags: Any) -> EngineConfig:
    return resolve(EngineConfig(model_path=path, **flags), load_model_config(path), cuda=cuda)


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_what_two_lanes_cannot_share_is_refused_by_name(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"--enable-pdmux: {said}.*leave one of them out"):
        resolved(enable_pdmux=True, **flags)


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3_next")
    with pytest.raises(ConfigError, match=r"--enable-pdmux: not with the recurrent layers of --model-path .*/model"):
        resolved(path, enable_pdmux=True)


def test_an_objective_without_lanes_is_refused() -> None:
    with pytest.raises(ConfigError, match="--pdmux-itl: is the objective of --enable-pdmux; give both"):
        resolved(pdmux_itl_s=0.05)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_worker_of_one_phase_refuses_it(mode: str) -> None:
    engine = EngineConfig(model_path=DEFAULT_MODEL_PATH, num_threads=1, enable_pdmux=True)
    with pytest.raises(ConfigError, match=f"--enable-pdmux: not with --disaggregation-mode {mode}"):
        plan_session(engine=engine, server=ServerConfig(), disagg=DisaggConfig(disaggregation_mode=mode))


def test_decodes_have_steps_of_their_own_on_a_stream_that_runs_beside_the_loop() -> None:
    config = resolved(enable_pdmux=True, device="cpu")
    assert (config.enable_mixed_chunk, config.stream, depth(config)) == (False, "threaded", 2)
    assert limits(config).multiplexed and not limits(config).mixed_chunk
    assert not limits(resolved(device="cpu")).multiplexed


@pytest.mark.parametrize(("device", "waits"), [("cpu", True), ("cuda", False)])
def test_prompts_wait_for_decodes_on_a_cpu_alone(device: str, waits: bool) -> None:
    share = lane_share(resolved(enable_pdmux=True, device=device, cuda=True), parts=1)
    share.note(0.3)
    assert (share.due_s(0.0) > 0) == waits
