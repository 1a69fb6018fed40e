"""What an engine does with packed weights beside steps: adapters, other weights, memory that goes and comes."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.linear import PackedMatrix, linear_kernel
from engine.messages import LogprobOptions
from engine.quant.integers import HEAD, SCHEMES, quantized
from service.flags import ConfigError
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import ranks
from tests.lora.tiny_adapters import make_tiny_adapter
from tests.models.tiny_checkpoints import edit_tensors, make_tiny_checkpoint
from tests.models.tiny_gguf import make_tiny_gguf
from tests.quant.stored_formats import make_both

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
PROMPT = prompt_of(60, 1)
PROMPTS = [prompt_of(70, 1), prompt_of(9, 2), prompt_of(33, 3)]
KINDS = ("int8wo", "awq", "Q4_1")  # rounded while they load, stored in a checkpoint, stored in a GGUF file

pytestmark = pytest.mark.skipif(linear_kernel() is None, reason="integers are multiplied by our kernel alone")


def make(folder: Path, kind: str, *, seed: int = 0) -> tuple[str, str]:
    """A model for `flags_of`, and a checkpoint of the floats that its integers stand for."""
    if kind == "awq":
        return make_both(folder, "awq", "qwen3", seed=seed, **SIZES)
    if kind == "Q4_1":
        file, floats = make_tiny_gguf(folder, "qwen3", kind, seed=seed)
        return str(file), str(floats)
    path, twin = (make_tiny_checkpoint(folder / name, "qwen3", seed=seed, **SIZES) for name in ("path", "twin"))
    edit_tensors(Path(twin) / "model.safetensors", round_matrices)
    return path, twin


def round_matrices(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith(("_proj.weight", "lm_head.weight")):
            tensors[name] = quantized(
                tensor.bfloat16().float(), HEAD if name.startswith("lm_head") else SCHEMES["int8wo"]
            ).dense()


def flags_of(kind: str) -> dict[str, Any]:
    return {"dtype": "bfloat16", "quantization": kind if kind in SCHEMES else None}


def answer(engine: EngineInProcess, rid: str) -> list[int]:
    return engine.answer(rid, PROMPT, max_new_tokens=12)


def assert_packed(engine: EngineInProcess) -> None:
    for site in engine.parts.device.executor.runner.running.model.linear_sites():
        matrix = site.linear._matrix  # type: ignore[attr-defined]
        assert isinstance(matrix, PackedMatrix) and matrix._args.bits


@pytest.mark.parametrize("kind", KINDS)
def test_weights_go_and_come_and_others_take_their_place(kind: str, tmp_path: Path) -> None:
    (first, _), (second, _) = (make(tmp_path / str(seed), kind, seed=seed) for seed in (1, 2))
    with EngineInProcess(second, **flags_of(kind)) as other:
        wanted = answer(other, "a")
    with EngineInProcess(first, **flags_of(kind)) as engine:
        weights, before = engine.parts.weights, answer(engine, "before")
        model = weakref.ref(engine.parts.device.executor.runner.running.model)
        weights.release()
        gc.collect()
        assert model() is None, "something keeps the weights"
        weights.take(weights.read(first, when_done=lambda: None).result(), model_path=first, version=None)
        assert engine.parts.scheduler.flush_cache()
        assert answer(engine, "resumed") == before != wanted
        weights.take(weights.read(second, when_done=lambda: None).result(), model_path=second, version=None)
        assert engine.parts.scheduler.flush_cache()
        assert answer(engine, "updated") == wanted
        assert_packed(engine)


WAYS: list[dict[str, Any]] = [
    {"chunked_prefill_size": 32, "page_size": 4},
    {"disable_cuda_graph": True},
    {"stream": "threaded"},
]


def answers(engine: EngineInProcess) -> list[list[int]]:
    for index, prompt in enumerate(PROMPTS):
        engine.add(f"{index}", prompt, max_new_tokens=16, temperature=0.8, seed=index)
    engine.run()
    return [engine.tokens[f"{index}"] for index in range(len(PROMPTS))]


@pytest.mark.parametrize("kind", [*KINDS, "int4wo-32"])
def test_every_way_to_a_token_has_the_same(kind: str, tmp_path: Path) -> None:
    path, _ = make(tmp_path, kind)
    flags = {**flags_of(kind), "reduce_units": 2}
    with EngineInProcess(path, **flags) as engine:
        expected = answers(engine)
        assert_packed(engine)
        assert engine.parts.model.signature().endswith(f"/{kind}") or kind not in SCHEMES
    for other in WAYS:
        with EngineInProcess(path, **flags, **other) as engine:
            assert answers(engine) == expected, other
    with ranks(path, tp_size=2, **flags) as two:
        assert answers(two.engine) == expected


def logprobs(engine: EngineInProcess, adapter: int) -> torch.Tensor:
    """[tokens of the prompt but the first], with an adapter or none (0)."""
    engine.answer(f"{adapter}", PROMPT, max_new_tokens=1, logprobs=LogprobOptions(0, 0), adapter=adapter)
    return torch.tensor([entry.logprob for entry in engine.input_logprobs[f"{adapter}"][1:]])


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_change_packed_weights_answers_as_those_of_floats(kind: str, tmp_path: Path) -> None:
    path, twin = make(tmp_path, kind)
    adapter = make_tiny_adapter(tmp_path / "adapter", twin, seed=1, layers=(0, 1))
    found = []
    for model, flags in ((path, flags_of(kind)), (twin, {"dtype": "bfloat16"}), (twin, {"dtype": "float32"})):
        with EngineInProcess(model, enable_lora=True, **flags) as engine:
            store = engine.parts.device.adapters
            assert store is not None
            store.install(1, store.read(adapter))
            found.append((logprobs(engine, 0), logprobs(engine, 1)))
    (alone, packed), (_, rounded), (_, exact) = found
    assert (packed - alone).abs().mean() > 0.1, "the adapter changes little"
    assert (packed - exact).abs().mean() < 1.5 * (rounded - exact).abs().mean() < 0.1


def test_weights_stored_otherwise_are_refused_by_name(tmp_path: Path) -> None:
    path, twin = make(tmp_path, "awq")
    with EngineInProcess(path, dtype="bfloat16") as engine:
        reading = engine.parts.weights.read(twin, when_done=lambda: None)
        with pytest.raises(ConfigError, match="quantization is none, the running model has awq4"):
            reading.result()
