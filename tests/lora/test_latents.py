"""Adapters of latent attention: what merged weights give; what is absorbed is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from service.flags import ConfigError
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.test_parity import greedy
from tests.lora.tiny_adapters import make_tiny_adapter, merge
from tests.models.tiny_checkpoints import make_tiny_checkpoint

FAMILIES: dict[str, tuple[str, ...]] = {
    "deepseek_v2": ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "deepseek_v32": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_gives_what_merged_weights_give(family: str, tmp_path: Path) -> None:
    base = make_tiny_checkpoint(tmp_path / "base", family)
    adapter = make_tiny_adapter(tmp_path / "adapter", base, seed=1, targets=FAMILIES[family])
    merged = merge(tmp_path / "merged", base, family, adapter, {"": 2.0})
    prompt = prompt_of(40, 7)
    with EngineInProcess(base, enable_lora=True) as engine:
        store = engine.parts.device.adapters
        assert store is not None
        store.install(1, store.read(adapter))
        for rid, number in (("changed", 1), ("plain", 0)):
            engine.add(rid, prompt, adapter=number)
        engine.run()
        theirs: dict[str, Any] = {
            rid: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            for rid, path in (("changed", merged), ("plain", base))
        }
        assert engine.tokens == {rid: greedy(model, prompt)[0] for rid, model in theirs.items()}
        assert engine.tokens["changed"] != engine.tokens["plain"]
        absorbed = make_tiny_adapter(tmp_path / "absorbed", base, seed=2, targets=("kv_b_proj",))
        with pytest.raises(ConfigError, match=r"target_modules: 'kv_b_proj' is not supported"):
            store.read(absorbed)
