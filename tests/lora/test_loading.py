"""What is read from a PEFT directory, and what is refused: one line that names file and field, nothing loaded."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.config import EngineConfig
from engine.layers.linear import SiteShape
from engine.lora.bank import adapter_runs, add_delta
from engine.lora.peft_config import CONFIG_FILE, check_lora, lora_enabled, named_paths, read_peft_config
from engine.lora.weights import AdapterWeights, read_adapter
from engine.model_files.model_config import load_model_config
from engine.models.load import load_model
from service.flags import ConfigError
from tests.lora.tiny_adapters import make_tiny_adapter
from tests.models.tiny_checkpoints import edit_tensors, make_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("base"), "qwen3")


@pytest.fixture(scope="module")
def shapes(checkpoint: str) -> list[SiteShape]:
    model = load_model(checkpoint, load_model_config(checkpoint), dtype="float32", device="cpu", progress=False)
    return [site.shape for site in model.linear_sites()]


def first(tensors: dict[str, torch.Tensor], side: str = "A") -> str:
    return min(name for name in tensors if f"lora_{side}" in name)


FIELDS = {
    "use_dora": True,
    "bias": "all",
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "fan_in_fan_out": True,
    "trainable_token_indices": [1],
    "layer_replication": [[0, 2]],
    "alora_invocation_tokens": [1, 2],
    "peft_type": "IA3",
    "init_lora_weights": "pissa_niter_4",
    "r": 0,
    "lora_alpha": "16",
    "rank_pattern": {"q_proj": "4"},
    "alpha_pattern": {"layers\\.[0-3].*": 2},
    "target_modules": ["q_proj", "lm_head"],
}


@pytest.mark.parametrize("alpha", [10**400, -(10**400), 1e400, float("nan"), True, None, "1", [1]], ids=repr)
def test_a_scale_is_a_number(tmp_path: Path, alpha: object) -> None:
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"r": 8, "lora_alpha": alpha}))
    with pytest.raises(ConfigError, match="lora_alpha: must be a number, got"):
        read_peft_config(tmp_path)


def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    """A pipe would hold the reader, a device fill its memory."""
    for name, make in {"pipe": os.mkfifo, "device": lambda file: file.symlink_to("/dev/zero")}.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / CONFIG_FILE)
        with pytest.raises(ConfigError, match=r"adapter_config\.json: is no file"):
            read_peft_config(tmp_path / name)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_cannot_be_honoured_is_named(
    checkpoint: str, shapes: list[SiteShape], tmp_path: Path, field: str
) -> None:
    adapter = make_tiny_adapter(tmp_path, checkpoint, seed=1, **{field: FIELDS[field]})
    with pytest.raises(ConfigError, match=f"adapter_config.json: {field}"):
        read(adapter, shapes)


def read(adapter: str, shapes: list[SiteShape], max_rank: int | None = None) -> object:
    return read_adapter(adapter, shapes, dtype=torch.float32, device=torch.device("cpu"), max_rank=max_rank)


def test_a_digest_is_that_of_what_is_added(checkpoint: str, shapes: list[SiteShape], tmp_path: Path) -> None:
    def digest(name: str, **made: Any) -> str:
        weights = read(make_tiny_adapter(tmp_path / name, checkpoint, **{"seed": 1, **made}), shapes)
        assert isinstance(weights, AdapterWeights)
        return weights.digest

    assert digest("one") == digest("same", base_model_name_or_path="elsewhere")
    others = {digest("seed", seed=2), digest("scale", lora_alpha=16), digest("layers", layers=(0, 1))}
    assert len(others | {digest("one")}) == 4


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "other shape": (lambda t: t.update({first(t): torch.zeros(4, 63)}), r"has shape \[4, 63\], .* ask for \[4, 128\]"),
    "other rank": (lambda t: t.update({first(t): torch.zeros(5, 128)}), r"has shape \[5, 128\]"),
    "half a pair": (lambda t: t.pop(first(t, "B")), "has no lora_B"),
    "not a number": (lambda t: t.update({first(t): t[first(t)] * torch.nan}), "no numbers"),
    "not floats": (lambda t: t.update({first(t): t[first(t)].to(torch.int8)}), "is int8; supported: bfloat16"),
    "unknown matrix": (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(1)}), "lm_head"),
    "no such layer": (
        lambda t: t.update({first(t).replace("layers.0", "layers.9"): torch.zeros(1)}),
        "tensor .*layers.9.* changes nothing",
    ),
    "dora": (lambda t: t.update({first(t).replace("lora_A", "lora_magnitude_vector"): torch.zeros(1)}), "magnitude"),
    "nothing": (lambda t: t.clear(), "holds no tensor"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_named(checkpoint: str, shapes: list[SiteShape], tmp_path: Path, case: str) -> None:
    change, message = TENSORS[case]
    adapter = make_tiny_adapter(tmp_path, checkpoint, seed=1)
    edit_tensors(Path(adapter) / "adapter_model.safetensors", change)
    with pytest.raises(ConfigError, match=message):
        read(adapter, shapes)


@pytest.mark.parametrize("part", ["model.language_model.", "language_model.model."])
def test_adapters_of_a_model_that_sees_have_its_names(
    checkpoint: str, shapes: list[SiteShape], tmp_path: Path, part: str
) -> None:
    """Of transformers 5 and 4. Patterns go by the same names."""
    fields: dict[str, Any] = {"alpha_pattern": {f"{part}layers.1.self_attn.q_proj": 2}}
    plain = make_tiny_adapter(tmp_path / "plain", checkpoint, seed=1, alpha_pattern={"layers.1.self_attn.q_proj": 2})
    named = make_tiny_adapter(tmp_path / "named", checkpoint, seed=1, **fields)
    file = Path(named) / "adapter_model.safetensors"
    edit_tensors(file, lambda tensors: _rename(tensors, "base_model.model.model.", f"base_model.model.{part}"))
    same = zip(sites_of(plain, shapes), sites_of(named, shapes), strict=True)
    assert all(torch.equal(a, b) for ours, theirs in same for a, b in zip(ours, theirs, strict=True))
    twice = first(load_file(file)).replace(part, "model.")
    edit_tensors(file, lambda tensors: tensors.update({twice: tensors[first(tensors)].clone()}))
    with pytest.raises(ConfigError, match=r"changes model\.layers\.0\..* under two names"):
        read(named, shapes)


@pytest.mark.parametrize(
    "name", ["model.visual.blocks.0.attn.qkv", "visual.blocks.0.mlp.gate_proj", "vision_tower.q_proj"]
)
def test_an_adapter_of_the_vision_tower_is_refused(
    checkpoint: str, shapes: list[SiteShape], tmp_path: Path, name: str
) -> None:
    adapter = make_tiny_adapter(tmp_path, checkpoint, seed=1)
    tower = {f"base_model.model.{name}.lora_A.weight": torch.zeros(4, 8)}
    edit_tensors(Path(adapter) / "adapter_model.safetensors", lambda tensors: tensors.update(tower))
    with pytest.raises(ConfigError, match=f"tensor base_model.model.{name}.* changes the vision tower"):
        read(adapter, shapes)


def sites_of(adapter: str, shapes: list[SiteShape]) -> list[list[torch.Tensor]]:
    """The tensors of each changed site."""
    weights = read_adapter(adapter, shapes, dtype=torch.float32, device=torch.device("cpu"))
    return [[site.a, *(b for _, _, b in site.parts)] for site in weights.sites if site is not None]


def _rename(tensors: dict[str, torch.Tensor], before: str, after: str) -> None:
    for name in list(tensors):
        tensors[name.replace(before, after, 1)] = tensors.pop(name)


def test_broken_and_missing_files_are_reported_in_one_line(
    checkpoint: str, shapes: list[SiteShape], tmp_path: Path
) -> None:
    adapter = Path(make_tiny_adapter(tmp_path / "a", checkpoint, seed=1, rank=6))
    assert read(str(adapter), shapes, 6) is not None
    with pytest.raises(ConfigError, match="has rank 6, more than --max-lora-rank 5"):
        read(str(adapter), shapes, 5)
    (adapter / "adapter_model.safetensors").write_bytes(b"\x08\x00")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        read(str(adapter), shapes)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model.bin only, which is never read"):
        read(str(adapter), shapes)
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        read(str(adapter), shapes)
    for text in ("{", "[" * 100_000, "[1]", "\xff"):
        (adapter / "adapter_config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"adapter_config\.json"):
            read(str(adapter), shapes)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match="is this the directory of a PEFT adapter"):
        read(str(adapter), shapes)
    with pytest.raises(ConfigError, match="no such directory"):
        read("/nowhere", shapes)


def test_fused_matrices_change_by_their_parts(shapes: list[SiteShape], checkpoint: str, tmp_path: Path) -> None:
    """Only k and up of one layer: q, v, gate and every other layer stay."""
    adapter = make_tiny_adapter(tmp_path, checkpoint, seed=3, targets=("k_proj", "up_proj"), layers=(2,))
    weights = read_adapter(adapter, shapes, dtype=torch.float32, device=torch.device("cpu"))
    assert [i for i, site in enumerate(weights.sites) if site is not None] == [8, 10]
    tensors = load_file(Path(adapter) / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.2.self_attn.k_proj.lora"
    k = 2.0 * tensors[f"{prefix}_B.weight"] @ tensors[f"{prefix}_A.weight"]  # alpha 8 / rank 4
    x, site = torch.randn(5, 64), weights.sites[8]
    assert site is not None
    wanted = torch.zeros(5, 128)
    wanted[:, 64:96] = x @ k.t()
    y = torch.zeros(5, 128)
    add_delta(site, x[1:3], y[1:3])
    assert not y[[0, 3, 4]].any()
    torch.testing.assert_close(y[1:3], wanted[1:3])


def test_runs_of_tokens_by_adapter() -> None:
    assert adapter_runs([]) == [] and adapter_runs([(0, 5), (0, 1)]) == []
    items = [(0, 3), (7, 2), (7, 1), (0, 1), (7, 4), (5, 1), (5, 2)]
    assert adapter_runs(items) == [(7, slice(3, 6)), (7, slice(7, 11)), (5, slice(11, 14))]


def test_flags_of_adapters() -> None:
    config = EngineConfig(lora_paths=("a=/x/a", "/y/b=c", "/plain"))
    assert named_paths(config.lora_paths) == {"a": "/x/a", "/y/b": "c", "/plain": "/plain"} and lora_enabled(
        False, config.lora_paths
    )
    assert lora_enabled(True, ()) and not lora_enabled(False, ())


BAD_FLAGS = {
    "--lora-paths =x": {"paths": ("=x",), "max_loaded": None},
    "--lora-paths a=": {"paths": ("a=",), "max_loaded": None},
    "two adapters are called 'a'": {"paths": ("a=1", "a=2"), "max_loaded": None},
    "2 adapters are more than --max-loaded-loras 1": {"paths": ("a=1", "b=1"), "max_loaded": 1},
}


@pytest.mark.parametrize("message", BAD_FLAGS)
def test_flags_that_cannot_be_honoured_are_named(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_lora(**BAD_FLAGS[message])  # type: ignore[arg-type]


def test_patterns_give_single_matrices_their_rank_and_alpha(
    checkpoint: str, shapes: list[SiteShape], tmp_path: Path
) -> None:
    patterns = {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"q_proj": 16}}
    adapter = make_tiny_adapter(
        tmp_path, checkpoint, seed=1, targets=("q_proj",), ranks={"layers.1.self_attn.q_proj": 2}, **patterns
    )
    weights = read_adapter(adapter, shapes, dtype=torch.float32, device=torch.device("cpu"))
    tensors = load_file(Path(adapter) / "adapter_model.safetensors")
    for layer, scale in ((0, 16 / 4), (1, 16 / 2)):
        site = weights.sites[4 * layer]
        assert site is not None
        ((_, _, b),) = site.parts
        wanted = scale * tensors[f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_B.weight"]
        torch.testing.assert_close(b, wanted.t())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {}}))
    with pytest.raises(ConfigError, match=r"has shape \[2, 64\]"):
        read(adapter, shapes)
