"""Drafters beside experts that lie whole on ranks: their own are divided, too, and stay where they are while the model's move."""

from pathlib import Path
from typing import Any

from engine.models.expert_parallel import ExpertParallelMLP
from engine.models.layer_kinds import mixtures_in
from tests.e2e.images.test_images import FLAGS, ask, prompts_of
from tests.engine.drafts.drafters import always, answers_to, fared
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import ranks
from tests.models.tiny_checkpoints import make_tiny_checkpoint
from tests.models.tiny_seeing import with_mtp

MOVING: dict[str, Any] = {"tp_size": 2, "ep_size": 2, "enable_eplb": True, "eplb_rebalance_num_iterations": 2}


def test_mtp_of_a_mixture_that_sees_changes_no_answer(tmp_path: Path) -> None:
    """With images, recurrent states, divided images and experts that move: all of a step at once."""
    path, asked = with_mtp(tmp_path / "sees", "qwen3_5_moe"), prompts_of("qwen3_5_moe")
    with EngineInProcess(path, **FLAGS) as engine:
        right = ask(engine, asked)
    drafts = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "mm_enable_dp_encoder": True}
    with ranks(path, **MOVING, **drafts, ep_num_redundant_experts=2, **FLAGS) as group:
        always(group.engine.parts.scheduler)
        assert ask(group.engine, asked) == right
        assert fared(group.engine).drafts
        model = group.engine.parts.device.executor.runner.running.model
        drafter: Any = model.drafter
        (mixture,) = mixtures_in(drafter._layer)
        assert isinstance(mixture, ExpertParallelMLP)
        assert model.balance is not None and model.balance.moved_layers
        assert mixture not in model.balance.layers and len(model.balance.layers) == model.num_layers


def test_a_mixture_that_drafts_is_divided_over_ranks(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    drafter = make_tiny_checkpoint(tmp_path / "drafter", "qwen3_moe", num_hidden_layers=1)
    prompts = [prompt_of(40, 1), prompt_of(9, 2)]
    with EngineInProcess(path, **FLAGS) as engine:
        right = answers_to(engine, prompts, new=24)
    drafts = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": drafter}
    with ranks(path, **MOVING, **drafts, **FLAGS) as group:
        always(group.engine.parts.scheduler)
        assert answers_to(group.engine, prompts, new=24) == right
        assert fared(group.engine).drafts
