"""Tensors of a request, in an engine: tokens are those of a fresh engine with the same weights, whatever part came in which call."""

import gc
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from engine.kernels.linear import linear_kernel
from engine.messages import JoinTrainer, NewTensors
from engine.models.decoder import DenseDecoder
from service.flags import ConfigError
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import engine_of
from tests.models.tiny_checkpoints import edit_tensors, make_tiny_checkpoint
from tests.models.tiny_gguf import make_tiny_gguf
from tests.quant.stored_formats import make_both

PROMPT = prompt_of(40, 1)
DEADLINE_S = 60.0
SIZES: dict[str, Any] = {"num_hidden_layers": 2}


def tensors_of(checkpoint: str) -> dict[str, Tensor]:
    return load_file(Path(checkpoint) / "model.safetensors")


def answer(engine: EngineInProcess, rid: str) -> list[int]:
    engine.parts.scheduler.flush_cache()
    return engine.answer(rid, PROMPT, max_new_tokens=8)


def fresh(checkpoint: str, **flags: Any) -> list[int]:
    with EngineInProcess(checkpoint, **flags) as engine:
        return answer(engine, "fresh")


def update(engine: EngineInProcess, tensors: Mapping[str, Tensor] | NewTensors) -> None:
    """Raises ConfigError."""
    weights = engine.parts.weights
    new = tensors if isinstance(tensors, NewTensors) else NewTensors(data=save(dict(tensors)))
    read = weights.read(weights.model_path, when_done=lambda: None, tensors=new)
    weights.take(read.result(DEADLINE_S), model_path=weights.model_path, version="2")


def in_parts(tensors: dict[str, Tensor], count: int) -> Iterable[dict[str, Tensor]]:
    """By every `count`th name, so that fused matrices are parted."""
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[part::count]} for part in range(count)]


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "fused by us": ("qwen3", {}),
    "fused in the file": ("phi3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {}),
    "multimodal names": ("gemma3_text", {}),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_after_the_last_part_are_those_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    family, fields = FAMILIES[kind]
    first, second = (
        make_tiny_checkpoint(tmp_path / str(seed), family, seed=seed, **SIZES, **fields) for seed in (1, 2)
    )
    named = {f"model.language_model.{name.removeprefix('model.')}" if kind == "multimodal names" else name: tensor
             for name, tensor in tensors_of(second).items()}  # fmt: skip
    if kind == "multimodal names":
        named["lm_head.weight"] = named.pop("model.language_model.lm_head.weight")
    if kind == "tied":
        named["lm_head.weight"] = named["model.embed_tokens.weight"] + 1  # as trainers send it; the embeddings count
    wanted = fresh(second)
    with EngineInProcess(first) as engine:
        before = answer(engine, "before")
        *parts, last = in_parts(named, 3)
        for part in parts:
            update(engine, part)
        assert answer(engine, "between") != wanted
        update(engine, last)
        assert answer(engine, "after") == wanted != before


@pytest.mark.skipif(linear_kernel() is None, reason="integers are multiplied by our kernel alone")
@pytest.mark.parametrize("quantization", ["awq", "int8wo"])
def test_quantized_weights_are_changed_as_the_checkpoint_stores_them(quantization: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, **SIZES}

    def make(seed: int) -> str:
        if quantization == "awq":
            return make_both(tmp_path / str(seed), "awq", "qwen3", seed=seed, **sizes)[0]
        return make_tiny_checkpoint(tmp_path / str(seed), "qwen3", seed=seed, **sizes)

    flags = {"dtype": "bfloat16", "quantization": None if quantization == "awq" else quantization}
    first, second = make(1), make(2)
    wanted = fresh(second, **flags)
    with EngineInProcess(first, **flags) as engine:
        for part in in_parts(tensors_of(second), 2):
            update(engine, part)
        assert answer(engine, "after") == wanted


def test_a_gguf_file_takes_no_tensors_and_no_trainer(tmp_path: Path) -> None:
    file, _ = make_tiny_gguf(tmp_path, "qwen3", "Q8_0")
    with EngineInProcess(str(file)) as engine:
        with pytest.raises(ConfigError, match="tensors of a GGUF file cannot be replaced"):
            update(engine, {NORM: torch.ones(64)})
        with pytest.raises(ConfigError, match="tensors of a GGUF file cannot be replaced"):
            engine.parts.trainers.join(JoinTrainer("j", "g", "h", 1, rank_offset=1, world_size=2, backend="gloo"))


def test_an_engine_of_dummy_weights_gets_real_ones(tmp_path: Path) -> None:
    """As trainers start it, with bf16 for the fp32 of config.json."""
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3", seed=1, dtype="bfloat16", **SIZES)
    wanted, tensors = fresh(path), tensors_of(path)
    (tmp_path / "model" / "model.safetensors").unlink()
    with EngineInProcess(path, load_format="dummy") as engine:
        before = answer(engine, "before")
        for name, tensor, text in (
            ("model.layers.7.mlp.up_proj.weight", tensors["model.norm.weight"], "is not part of the model"),
            ("model.norm.weight", torch.ones(3), r"has shape \[3\], config.json asks for \[64\]"),
            ("model.norm.weight", torch.ones(64, dtype=torch.int32), "is int32, and must be of"),
        ):
            with pytest.raises(ConfigError, match=text):
                update(engine, {name: tensor})
        assert answer(engine, "refused") == before
        for part in in_parts(tensors, 2):
            update(engine, part)
        assert answer(engine, "after") == wanted != before


Edit = Callable[[dict[str, Tensor]], Any]
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
BAD: dict[str, tuple[Edit, str]] = {
    "unknown": (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": t[UP].clone()}), "is not part of the model"),
    "shape": (lambda t: t.update({UP: t[UP].T.contiguous()}), r"has shape \[64, 128\], the checkpoint's \[128, 64\]"),
    "dtype": (lambda t: t.update({NORM: t[NORM].int()}), "is int32, the checkpoint's float32"),
    "twice": (
        lambda t: t.update({"model.language_model.norm.weight": t[NORM].clone()}),
        "comes twice, by two of its names",
    ),
}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_does_not_fit_changes_nothing_and_is_named(tp_size: int, tmp_path: Path) -> None:
    first, second = (make_tiny_checkpoint(tmp_path / str(seed), "qwen3", seed=seed, **SIZES) for seed in (1, 2))
    open_files = num_unnamed_files()
    with engine_of(first, tp_size=tp_size, num_threads=1) as engine:
        before, number = answer(engine, "before"), engine.parts.weights.number()
        for kind, (edit, text) in BAD.items():
            tensors = tensors_of(second)
            edit(tensors)
            with pytest.raises(ConfigError, match=text):
                update(engine, tensors)
            assert answer(engine, kind) == before
        with pytest.raises(ConfigError, match="is not a safetensors file"):
            update(engine, NewTensors(data=b"\x08" * 40))
        assert (engine.parts.weights.source, engine.parts.weights.number()) == ("checkpoint", number)
        gc.collect()
        assert num_unnamed_files() == open_files, "refused tensors are kept"


def test_tensors_outlast_released_memory_and_go_with_a_checkpoint(tmp_path: Path) -> None:
    """The number by which workers of a pair compare their weights follows, however the tensors were divided."""
    first, second = (make_tiny_checkpoint(tmp_path / str(seed), "qwen3", seed=seed, **SIZES) for seed in (1, 2))
    wanted, tensors, open_files = fresh(second), tensors_of(second), num_unnamed_files()
    with EngineInProcess(first) as engine:
        weights, before = engine.parts.weights, answer(engine, "before")
        own = weights.number()
        numbers = []
        for count in (1, 3):
            for part in in_parts(tensors, count):
                update(engine, part)
            numbers.append(weights.number())
        assert numbers[0] == numbers[1] != own
        gc.collect()
        assert num_unnamed_files() == open_files + 3, "replaced tensors are kept"
        weights.release()
        update(engine, NewTensors())
        assert answer(engine, "resumed") == wanted
        weights.undoes = True  # as of several DP ranks
        update(engine, {UP: tensors[UP].flip(0)})
        assert answer(engine, "changed") != wanted
        update(engine, NewTensors(undo=True))
        assert (answer(engine, "undone"), weights.number()) == (wanted, numbers[0])
        read = weights.read(first, when_done=lambda: None)
        weights.take(read.result(DEADLINE_S), model_path=first, version=None)
        assert (answer(engine, "back"), weights.number(), weights.source) == (before, own, "checkpoint")


@pytest.mark.parametrize("changed", [UP, "model.embed_tokens.weight", "lm_head.weight"])
def test_only_what_has_new_tensors_is_loaded(changed: str, tmp_path: Path) -> None:
    """A part of a large model takes the time and memory of its layers."""
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3", seed=1, **SIZES)
    new = {changed: tensors_of(path)[changed].flip(0)}
    with EngineInProcess(path) as engine:
        before, old = answer(engine, "before"), running(engine)
        layers, head = list(old._layers), old._head
        update(engine, new)
        after, model = answer(engine, "after"), running(engine)
        assert [mine is theirs for mine, theirs in zip(model._layers, layers, strict=True)] == [True, changed != UP]
        assert (model._head is head) == (changed == UP)
    edit_tensors(Path(path) / "model.safetensors", lambda tensors: tensors.update(new))
    assert after == fresh(path) != before


def running(engine: EngineInProcess) -> DenseDecoder:
    return engine.parts.device.executor.runner.running.model


def num_unnamed_files() -> int:
    gc.collect()
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "tandem-weights" in os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found
