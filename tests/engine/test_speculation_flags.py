"""What speculation does not work with is refused at start, by name."""

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.flags.resolve import resolve
from engine.model_files.model_config import load_model_config
from service.flags import ConfigError
from tests.models.tiny_checkpoints import make_tiny_checkpoint


@pytest.mark.parametrize(
    ("family", "flags", "said"),
    [
        ("qwen3", {"pp_size": 2}, "--speculative-algorithm NGRAM: --pp-size 2 has other tokens in flight; .*--tp-size"),
        ("qwen3", {"dp_size": 2, "tp_size": 2, "enable_dp_attention": True}, "--enable-dp-attention agrees"),
        ("qwen3_next", {}, "--speculative-algorithm NGRAM: a recurrent state cannot go back"),
        (
            "qwen3",
            {"speculative_ngram_min_match_window_size": 5, "speculative_ngram_max_match_window_size": 4},
            r"--speculative-ngram-min-match-window-size 5: must be at most --speculative-ngram-max-match-window-size \(4\)",
        ),
    ],
)
def test_what_does_not_work_is_refused(tmp_path: Path, family: str, flags: dict[str, Any], said: str) -> None:
    path = make_tiny_checkpoint(tmp_path / family, family)
    config = EngineConfig(model_path=path, speculative_algorithm="NGRAM", **flags)
    with pytest.raises(ConfigError, match=said):
        resolve(config, load_model_config(path), cuda=False)
