"""The models that engines are compared on, as each engine reads them: a folder of safetensors, GGUF files of the same weights."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from benchmarks.peer_loads import SHIPPED, Vocabulary
from benchmarks.random_model import write_model
from engine.gguf.file import config_fields, open_gguf
from engine.model_files.hub import smollm2_file
from engine.model_files.model_config import load_model_config
from engine.models.checkpoint import Checkpoint
from engine.text.tokenizer import load_tokenizer
from tests.models.files.gguf_file import write_gguf
from tests.models.tiny_checkpoints import tensor_shapes

BF16, QUANTIZED = "bf16", ("Q8_0", "Q4_0")
SHAPE, SMOLLM2 = "Qwen3-0.6B's shape", "SmolLM2-135M"
WORDS = " ".join(f"{'kv'[number % 2]}{number:02d}" for number in range(100))  # as `tandem bench` writes them


@dataclass(frozen=True, kw_only=True)
class PeerModel:
    """`gguf`: files by the type of their matrices."""

    name: str
    folder: Path
    vocabulary: Vocabulary = SHIPPED
    gguf: Mapping[str, Path] = field(default_factory=dict)


def make_models(root: Path, names: list[str], *, quantize: Path | None) -> Iterator[PeerModel]:
    """Write the models into folders of `root`, one at a time; GGUF files only where llama.cpp's `quantize` is given."""
    for name in names:
        folder = root / name.lower().replace("'", "").replace(" ", "-")
        if name == SMOLLM2:
            write_smollm2(folder)
            vocabulary = Vocabulary(low=1000, high=20000, tokens_a_word=_tokens_a_word(folder))
        else:
            write_model(folder)
            vocabulary = SHIPPED
        files = {} if quantize is None else _gguf_files(folder, quantize)
        yield PeerModel(name=name, folder=folder, vocabulary=vocabulary, gguf=files)


def _tokens_a_word(folder: Path) -> float:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return len(tokenizer.encode(WORDS, add_special_tokens=False).ids) / len(WORDS.split())


def _gguf_files(folder: Path, quantize: Path) -> dict[str, Path]:
    """bf16, and what llama.cpp makes of that: all matrices of one type."""
    whole = folder.parent / f"{folder.name}-{BF16}.gguf"
    write_gguf(folder, whole, "BF16")
    files = {BF16: whole}
    for kind in QUANTIZED:
        files[kind] = folder.parent / f"{folder.name}-{kind}.gguf"
        subprocess.run(
            [quantize, "--pure", whole, files[kind], kind], check=True, stdout=sys.stderr, stderr=subprocess.DEVNULL
        )
    return files


def write_smollm2(folder: Path) -> None:
    """Write SmolLM2 as safetensors in bfloat16, which every engine reads; raises `ConfigError` where its package is not installed."""
    path = smollm2_file()
    folder.mkdir(parents=True, exist_ok=True)
    fields = config_fields(open_gguf(path))
    theta = fields["rope_parameters"]["rope_theta"]
    old_names = {"rope_theta": theta, "torch_dtype": "bfloat16", "hidden_act": "silu"}  # of transformers 4
    (folder / "config.json").write_text(json.dumps({**fields, **old_names}, indent=1))
    tokenizer = load_tokenizer(path)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer.config, **kind}))
    with torch.inference_mode(), Checkpoint(str(path), dtype="float32", device="cpu", progress=False) as checkpoint:
        shapes = tensor_shapes({**fields, "head_dim": load_model_config(str(path)).head_dim})
        weights = {name: checkpoint.take(name, shape).bfloat16() for name, shape in shapes.items()}
        checkpoint.check_all_taken()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
