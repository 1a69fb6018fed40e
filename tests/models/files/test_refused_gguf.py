"""GGUF files that cannot be served: each is one clear line, whatever is wrong or damaged in it."""

import dataclasses
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.gguf.file import open_gguf
from engine.gguf.tokenizer import gguf_tokenizer, gguf_tokenizer_config
from engine.model_files.directory import GGUFFolder
from engine.model_files.model_config import _model_config, load_model_config
from engine.models.load import load_model
from engine.text.tokenizer import load_tokenizer
from service.flags import ConfigError
from tests.models.tiny_gguf import make_tiny_gguf


def load_all(file: Path) -> None:
    config = load_model_config(str(file))
    load_tokenizer(file)
    load_model(str(file), config, dtype="float32", device="cpu", progress=False)


def without_tokenizer(writer: gguf.GGUFWriter) -> None:
    for keys in writer.kv_data:
        for name in [name for name in keys if name.startswith("tokenizer.")]:
            del keys[name]


Edit = Callable[[gguf.GGUFWriter], object]


def set_value(name: str, value: Any) -> Edit:
    return lambda writer: setattr(writer.kv_data[0][name], "value", value)


def drop_value(name: str) -> Edit:
    return lambda writer: writer.kv_data[0].pop(name)


def drop_tensor(name: str) -> Edit:
    return lambda writer: writer.tensors[0].pop(name)


def quantized_in(kind: gguf.GGMLQuantizationType) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        stored = np.zeros((512, 256 // elements * size), dtype=np.uint8)
        writer.tensors[0].pop("blk.1.ffn_up.weight")
        writer.add_tensor("blk.1.ffn_up.weight", stored, raw_dtype=kind)

    return edit


WRONG: dict[str, tuple[Edit, str]] = {
    "architecture": (set_value("general.architecture", "gemma2"), "general.architecture is 'gemma2'.*supported: llama"),
    "experts": (lambda w: w.add_expert_count(8), r"llama.expert_count: mixture-of-experts"),
    "no layers": (drop_value("llama.block_count"), "metadata llama.block_count is missing; convert"),
    "strange heads": (set_value("llama.attention.head_count_kv", 3), "num_key_value_heads: 3 does not divide"),
    "no factor": (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), "factor: is missing"),
    "longrope": (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "short_factor: is missing"),
    "partial rope": (set_value("llama.rope.dimension_count", 32), "partial RoPE is not supported"),
    "type": (quantized_in(gguf.GGMLQuantizationType.IQ4_XS), r"tensor blk.1.ffn_up.weight has type IQ4_XS.*Q4_K_M"),
    "old type": (quantized_in(gguf.GGMLQuantizationType.Q5_1), "has type Q5_1, which is not supported; take a file"),
    "missing tensor": (drop_tensor("blk.1.ffn_up.weight"), "mlp.up_proj.weight is missing; download"),
    "no embedding": (drop_tensor("token_embd.weight"), "token_embd.weight is missing"),
    "unknown tensor": (
        lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((2, 32), dtype=np.float32)),
        "tensor blk.0.ffn_gate_inp.weight is not part of the model that the metadata describes",
    ),
    "shape": (set_value("llama.feed_forward_length", 768), r"ffn_gate.weight has shape \[512, 256\], .* \[768, 256\]"),
    "tokenizer": (without_tokenizer, r"has no tokenizer in its metadata \(tokenizer.ggml"),
    "tokenizer model": (set_value("tokenizer.ggml.model", "rwkv"), "tokenizer.ggml.model is 'rwkv'.*gpt2, llama"),
    "pre": (set_value("tokenizer.ggml.pre", "chameleon"), "pre is 'chameleon'.*supported: default, gpt-2"),
    "merges": (set_value("tokenizer.ggml.merges", ["no such"]), "its tokenizer cannot be used"),
    "no merges": (drop_value("tokenizer.ggml.merges"), "metadata tokenizer.ggml.merges is missing"),
    "eos": (set_value("tokenizer.ggml.eos_token_id", 99999), "eos_token_id: 99999 is not a token id"),
    "split": (lambda w: w.add_uint16("split.count", 3), "one part of a split model; join the parts"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_served_is_one_line_that_names_it(wrong: str, tmp_path: Path) -> None:
    edit, message = WRONG[wrong]
    file, _ = make_tiny_gguf(tmp_path, "llama", edit=edit)
    with pytest.raises(ConfigError, match=message) as error:
        load_all(file)
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_gguf(tmp_path_factory.mktemp("good"), "llama", "Q8_0")[0]


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "is empty; download it again"),
    "magic": (lambda data: b"PK\3\4" + data[4:], "is not a GGUF file"),
    "old": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "is GGUF version 1; supported: 2 and 3"),
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "little-endian"),
    "cut in the header": (lambda data: data[:5000], "is cut off or corrupt: its header goes beyond byte 5000"),
    "cut in the tensors": (lambda data: data[:-100], "is cut off: tensor .* ends at byte"),
    "endless": (lambda data: data[:16] + struct.pack("<Q", 1 << 62) + data[24:], "is cut off or corrupt|corrupt"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_is_one_line_that_says_how(broken: str, good: Path, tmp_path: Path) -> None:
    damage, message = BROKEN[broken]
    file = tmp_path / "model.gguf"
    file.write_bytes(damage(good.read_bytes()))
    with pytest.raises(ConfigError, match=message) as error:
        load_all(file)
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)


def test_no_damage_is_anything_but_a_clear_error(good: Path, tmp_path: Path) -> None:
    """Cuts and flipped bytes anywhere in the header; some damage (a letter of a name) may go unnoticed."""
    data, rng, file = good.read_bytes(), random.Random(7), tmp_path / "model.gguf"
    header = open_gguf(good).tensors["token_embd.weight"].start
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.randrange(4)):
            damaged[rng.randrange(header)] = rng.randrange(256)
        cut = rng.randrange(1, header) if rng.random() < 0.3 else len(damaged)
        file.write_bytes(damaged[:cut])
        try:
            load_model_config(str(file))
            load_tokenizer(file)
        except ConfigError as error:
            assert str(error).startswith(str(file)) and "\n" not in str(error)


@pytest.mark.parametrize("value", ["text", -1, 1 << 40, 0.5, True, (), ("a", "b"), (1, 2)])
def test_a_value_of_another_type_is_a_clear_error_too(value: object, good: Path) -> None:
    file = open_gguf(good)
    for key in file.metadata:
        changed = dataclasses.replace(file, metadata={**file.metadata, key: value})
        for read in (
            lambda f: _model_config(GGUFFolder(f), GGUFFolder(f).config),
            gguf_tokenizer,
            gguf_tokenizer_config,
        ):
            try:
                read(changed)
            except ConfigError as error:
                assert str(error).startswith(str(good)) and "\n" not in str(error), key


def test_a_part_of_a_split_model_says_how_to_join_them(good: Path, tmp_path: Path) -> None:
    part = tmp_path / "model-00002-of-00003.gguf"
    shutil.copy(good, part)
    with pytest.raises(ConfigError, match="is part 2 of 3 of a split model; join the parts first: llama-gguf-split"):
        load_model_config(str(part))
