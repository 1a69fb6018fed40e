"""What DP attention refuses at start, by the flag and its remedy."""

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.flags.rank_rules import check_ranks
from engine.flags.resolve import resolve
from engine.model_files.model_config import WIDE_MODEL_PATH, load_model_config
from service.flags import ConfigError
from tests.models.tiny_checkpoints import make_tiny_checkpoint

TWO: dict[str, Any] = {"enable_dp_attention": True, "tp_size": 2, "dp_size": 2}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({**TWO, "dp_size": 1}, "--enable-dp-attention: --dp-size 1 is one DP rank; give --dp-size a divisor"),
        ({**TWO, "tp_size": 3}, "--dp-size 2 does not divide --tp-size 3, which counts the ranks of all DP ranks"),
        (
            {**TWO, "tp_size": 6},
            "--tp-size 6 with --dp-size 2: a DP rank's 3 does not divide the model's 8 attention heads",
        ),
        ({**TWO, "pp_size": 2}, "--enable-dp-attention: not with --pp-size 2; leave one of them out"),
        (
            {**TWO, "nnodes": 2, "dist_init_addr": "127.0.0.1:1"},
            "--enable-dp-attention: not with --nnodes 2; leave one of them out",
        ),
        ({**TWO, "enable_lora": True}, "--enable-dp-attention: not with --enable-lora: a rank computes MLPs"),
        ({**TWO, "lora_paths": ("a=b",)}, "--enable-dp-attention: not with --lora-paths: a rank computes MLPs"),
        ({**TWO, "tp_size": 4, "reduce_units": 2}, "--reduce-units 2: is not a multiple of --tp-size 4; choose 4"),
        ({"enable_prefill_delayer": True}, "--enable-prefill-delayer: prompts of DP ranks slow each other with"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_ranks(EngineConfig(model_path=WIDE_MODEL_PATH, **flags), load_model_config(WIDE_MODEL_PATH))
    assert said in str(refused.value)


def test_gpus_take_it_with_whole_experts_too(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    model = load_model_config(path)
    config = resolve(EngineConfig(model_path=path, **TWO, ep_size=2), model, cuda=True)
    assert config.device == "cuda"
    check_ranks(config, model)
