"""`tandem plan` with speculation: its flags, what the plan says of drafts, and what does not fit."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from engine.model_files.model_config import DEFAULT_MODEL_PATH, WIDE_MODEL_PATH, load_model_config
from planner.cluster import ClusterLayout
from planner.config import PlanConfig
from planner.memory import (
    page_bytes,
)
from planner.step_time import shape_of
from planner.study import Study, study_of
from service.flags import ConfigError
from tests.models.recall_drafters import build
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.planner.planned import in_process

PLAN = [
    "plan",
    "--model-path",
    WIDE_MODEL_PATH,
    "--gpu",
    "L4",
    "--layouts",
    "1U",
    "--rates",
    "2",
    "--num-requests",
    "20",
]


LOAD = ["--input-len", "100", "--output-len", "40", "--disable-progress"]


@in_process
def test_a_plan_says_what_drafts_and_how_often_it_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("EAGLE", tmp_path)
    drafter = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(tmp_path / "config.json")]
    output = tmp_path / "plan.json"
    assert main([*PLAN, *LOAD, *drafter, "--speculative-num-steps", "2", "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert "; EAGLE drafts at most 2 tokens, 70 % right" in text and "70 % of drafted tokens accepted" in text
    (point,) = json.loads(output.read_bytes())["layouts"][0]["points"]
    assert 1 <= point["step_tokens"] <= 3 and f"| {point['step_tokens']:.2f} |" in re.sub(" +", " ", text)
    assert main([*PLAN, *LOAD]) == 0
    assert "tokens a step" not in capsys.readouterr().out


def planned_with(**flags: Any) -> Study:
    flags = {"gpu": "L4", "layouts": ("1U",), "num_requests": 10, "input_len": 100, **flags}
    return study_of(PlanConfig(model_path=WIDE_MODEL_PATH, **flags))


def test_a_profile_may_have_the_accept_rate(tmp_path: Path) -> None:
    profile = tmp_path / "gpu.json"
    gpu = {"name": "X1", "tflops": 500, "memory_gb": 48, "memory_gb_s": 2000, "link_gb_s": 10, "peer_gb_s": 100}
    profile.write_text(json.dumps({"gpu": gpu, "accept_rate": 0.83}))
    flags = {"gpu": None, "gpu_profile": str(profile), "speculative_algorithm": "NGRAM"}
    for given, rate in ((None, 0.83), (0.5, 0.5)):
        speculation = planned_with(**flags, speculative_accept_rate=given).speculation[1]
        assert speculation is not None and speculation.accept_rate == rate
    profile.write_text(json.dumps({"gpu": gpu, "accept_rate": 1.2}))
    with pytest.raises(ConfigError, match=r"accept_rate must be between 0 and 1, got 1\.2$"):
        planned_with(**flags)


def test_weights_of_a_drafter_take_kv_and_may_not_fit() -> None:
    own = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": WIDE_MODEL_PATH}
    weights = shape_of(load_model_config(WIDE_MODEL_PATH)).weight_bytes
    layout = ClusterLayout(unified=1)
    flags: dict[str, Any] = {"mem_fraction_static": 0.95, "page_size": 16}
    for times, fits in ((1.5, False), (8.0, True)):
        flags["gpu_memory_gb"] = times * weights / 1e9
        alone = planned_with(**flags).kv_tokens(layout)
        if fits:
            beside = planned_with(**flags, **own).kv_tokens(layout)
            assert beside == pytest.approx(
                (alone - weights / page_bytes(load_model_config(WIDE_MODEL_PATH), page_size=1)) / 2, rel=0.01
            )
        else:
            with pytest.raises(ConfigError, match=r"^--gpu-memory-gb: 0 GB do not hold the model's"):
                planned_with(**flags, **own)


ALGORITHM, PATH = "--speculative-algorithm", "--speculative-draft-model-path"


def _mixture(folder: Path) -> list[str]:
    return [
        ALGORITHM,
        "STANDALONE",
        PATH,
        make_tiny_checkpoint(folder, "mixtral", vocab_size=load_model_config(WIDE_MODEL_PATH).vocab_size),
    ]


BAD: list[tuple[Callable[[Path], list[str]] | list[str], str]] = [
    (["--speculative-accept-rate", "0.5"], "--speculative-accept-rate: needs --speculative-algorithm"),
    ([ALGORITHM, "NGRAM", "--speculative-accept-rate", "1"], "--speculative-accept-rate: must be"),
    (["--speculative-match-rate", "0.5", ALGORITHM, "EAGLE3"], "--speculative-match-rate: needs --speculative-algorithm NGRAM"),
    ([ALGORITHM, "EAGLE3"], "--speculative-algorithm EAGLE3: needs --speculative-draft-model-path"),
    ([ALGORITHM, "NEXTN"], "--speculative-algorithm NEXTN: the model's config.json has no num_nextn_predict_layers"),
    ([ALGORITHM, "EAGLE", PATH, "/no/such"], "--speculative-draft-model-path /no/such: no such directory"),
    ([PATH, WIDE_MODEL_PATH], f"--speculative-draft-model-path {WIDE_MODEL_PATH}: --speculative-algorithm is not given"),
    ([ALGORITHM, "STANDALONE", PATH, DEFAULT_MODEL_PATH, "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "9"],
     "--speculative-num-draft-tokens 9: a step computes"),
    (_mixture, "--speculative-draft-model-path {folder}: the cost model knows dense models, not a mixture of experts"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "said"), BAD)
def test_what_does_not_fit_is_one_line_that_names_the_flag(
    args: Callable[[Path], list[str]] | list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *LOAD, *(args(tmp_path) if callable(args) else args)]) == 1
    text = capsys.readouterr().err
    assert text.startswith("tandem plan: error: " + said.format(folder=tmp_path)) and text.count("\n") == 1
