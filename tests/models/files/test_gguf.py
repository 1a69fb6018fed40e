"""GGUF files: the same weights, logits and configuration as the checkpoint they were made of."""

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.flags.local_defaults import default_threads
from engine.gguf import tensors
from engine.gguf.file import STORAGES, open_gguf
from engine.kv.kv_pool import fingerprint
from engine.model_files.model_config import load_model_config
from engine.models.checkpoint import Checkpoint
from engine.models.load import load_model
from tests.models.reference_attend import Sequence
from tests.models.test_parity import LLAMA3, YARN, random_ids
from tests.models.tiny_gguf import make_tiny_gguf

TOLERANCE = 1e-4  # of the largest logit; rounding brings 7e-6
KINDS = [storage.name for storage in STORAGES.values()]

VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"llama-{kind}": ("llama", kind, {}) for kind in KINDS},
    "mistral": ("mistral", "Q8_0", {}),
    "qwen2": ("qwen2", "Q4_0", {}),
    "qwen2-tied": ("qwen2", "Q6_K", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "Q4_K", {}),
    "qwen3-wide-heads": ("qwen3", "Q8_0", {"head_dim": 128, "rope_theta": 1e6, "tie_word_embeddings": True}),
    "llama-bias": ("llama", "F32", {"attention_bias": True}),
    "llama-3.1-rope": ("llama", "F16", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama-linear-rope": ("llama", "F16", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "qwen2-yarn": ("qwen2", "Q8_0", {"rope_scaling": YARN}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_exact_and_logits_those_of_transformers(variant: str, tmp_path: Path) -> None:
    family, kind, overrides = VARIANTS[variant]
    file, checkpoint = make_tiny_gguf(tmp_path, family, kind, **overrides)
    with Checkpoint(str(file), dtype="float32", device="cpu", progress=False) as taken:
        for name, expected in load_file(checkpoint / "model.safetensors").items():
            assert torch.equal(taken.take(name, expected.shape), expected), name
        taken.check_all_taken()
    ours = load_model(str(file), load_model_config(str(file)), dtype="float32", device="cpu", progress=False)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = random_ids(60)
    with torch.inference_mode():
        reference = theirs(torch.tensor([ids])).logits[0]
    assert reference.std() > 0.1
    assert (Sequence(ours).extend(ids) - reference).abs().max() < TOLERANCE * reference.abs().max()


@pytest.mark.parametrize(("family", "overrides"), [(f, o) for f, _, o in VARIANTS.values() if "rope_scaling" not in o])
def test_the_configuration_is_that_of_the_checkpoint(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    file, checkpoint = make_tiny_gguf(tmp_path, family, "F32", **overrides)
    ours, theirs = load_model_config(str(file)), load_model_config(str(checkpoint))
    for name in theirs.__dataclass_fields__:
        if name == "rms_norm_eps":  # fp32 in the file
            assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)
        elif name not in ("architecture", "model_type") or family != "mistral":
            assert getattr(ours, name) == getattr(theirs, name), name


def test_the_tokens_that_end_an_answer_are_all_found(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(5)
        writer.add_eom_token_id(6)

    file, _ = make_tiny_gguf(tmp_path, "llama", edit=edit)
    assert load_model_config(str(file)).eos_token_ids == (2, 5, 6)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_the_stored_type_decides_what_auto_means(kind: str, dtype: str, tmp_path: Path) -> None:
    file, _ = make_tiny_gguf(tmp_path, "llama", kind)
    assert load_model_config(str(file)).dtype == dtype


def test_header_and_values_are_those_that_the_gguf_package_reads(tmp_path: Path) -> None:
    file, _ = make_tiny_gguf(
        tmp_path, "qwen2", "Q8_0", edit=lambda writer: writer.add_array("some.floats", [0.5, -1.0])
    )
    reader, ours = gguf.GGUFReader(file), open_gguf(file)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert {name: list(v) if isinstance(v, tuple) else v for name, v in ours.metadata.items()} == theirs
    assert ours.metadata["some.floats"] == (0.5, -1.0)
    assert [(t.name, t.storage.name, t.shape[::-1], t.start, t.size_bytes) for t in ours.tensors.values()] == [
        (t.name, t.tensor_type.name, tuple(t.shape.tolist()), t.data_offset, t.n_bytes) for t in reader.tensors
    ]


def test_a_model_is_dequantized_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the model there are a few pieces of one tensor at any time."""
    monkeypatch.setattr(tensors, "ELEMENTS_AT_ONCE", 1 << 14)
    file, _ = make_tiny_gguf(tmp_path, "llama", "Q4_K", intermediate_size=16384, num_hidden_layers=1)
    config = load_model_config(str(file))
    load = lambda: load_model(str(file), config, dtype="float32", device="cpu", progress=False)  # noqa: E731
    load()
    tracemalloc.start()  # numpy's memory; that of the model is torch's
    load()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 16384 * 256 / 2, "less than half of one matrix in fp32"


def test_threads_and_fingerprint_follow_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.flags.local_defaults.BYTES_A_THREAD", 8 << 20)
    file, _ = make_tiny_gguf(tmp_path, "llama", "Q4_0", vocab_size=(8 << 20) // 512)
    assert default_threads(str(file), cores=64) == 2, "embedding and head, 8 MiB each in two bytes a weight"
    before = fingerprint(str(file))
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"\x5a")
    assert fingerprint(str(file)) != before


def test_reading_configuration_and_tokenizer_needs_neither_torch_nor_gguf(tmp_path: Path) -> None:
    file, _ = make_tiny_gguf(tmp_path, "qwen3")
    code = (
        "import sys; from engine.model_files.model_config import load_model_config; from engine.text.tokenizer import "
        f"load_tokenizer; load_model_config({str(file)!r}); load_tokenizer({str(file)!r}); "
        "assert not {'torch', 'gguf', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
