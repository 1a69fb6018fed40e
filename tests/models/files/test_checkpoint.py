"""Loading: shards, stray copies, and one clear line for files that do not fit."""

import json
import logging
import struct
import sys
from pathlib import Path

import pytest
import torch

from engine.model_files.model_config import load_model_config
from engine.models.checkpoint import LINE_EVERY_S, WATCHED_EVERY_S, LoadProgress
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model
from service.flags import ConfigError
from tests.models.reference_attend import Sequence
from tests.models.tiny_checkpoints import edit_tensors, make_tiny_checkpoint, write_json

IDS = list(range(20, 40))


def load(path: str, *, dtype: str = "float32") -> DenseDecoder:
    return load_model(path, load_model_config(path), dtype=dtype, device="cpu", progress=False)


def test_shards_give_the_same_model_as_one_file(tmp_path: Path) -> None:
    one = make_tiny_checkpoint(tmp_path / "one", "qwen2")
    many = make_tiny_checkpoint(tmp_path / "many", "qwen2", shards=4)
    assert not (tmp_path / "many" / "model.safetensors").exists()
    assert torch.equal(Sequence(load(one)).extend(IDS), Sequence(load(many)).extend(IDS))


def test_weights_are_no_view_of_the_file(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama")
    model = load(path)
    before = Sequence(model).extend(IDS)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(b"\xff" * 4096)
    assert torch.equal(Sequence(model).extend(IDS), before)


def test_stored_dtype_is_converted(tmp_path: Path) -> None:
    half = make_tiny_checkpoint(tmp_path, "llama", dtype="bfloat16")
    assert Sequence(load(half)).extend(IDS).dtype == torch.float32
    assert Sequence(load(half, dtype="bfloat16")).extend(IDS).dtype == torch.float32


def test_a_written_copy_of_a_tied_head_and_old_rope_buffers_are_ignored(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    before = Sequence(load(path)).extend(IDS)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    edit_tensors(tmp_path / "model.safetensors", add)
    assert torch.equal(Sequence(load(path)).extend(IDS), before)


def test_loading_shows_a_bar_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    path = make_tiny_checkpoint(tmp_path, "llama")
    load_model(path, load_model_config(path), dtype="float32", device="cpu", progress=False)
    assert capsys.readouterr() == ("", "")
    load_model(path, load_model_config(path), dtype="float32", device="cpu", progress=True)
    assert "100%" in capsys.readouterr().err


NORM = "model.layers.1.input_layernorm.weight"

BIAS = "model.layers.0.self_attn.o_proj.bias"


@pytest.mark.parametrize(
    ("pattern", "name", "tensor"),
    [
        (rf"tensor {NORM} is in no", NORM, None),
        (r"model\.safetensors: tensor model\.extra is not part", "model.extra", torch.ones(1)),
        (rf"model\.safetensors: tensor {NORM} has shape \[63\].*\[64\]", NORM, torch.ones(63)),
        (rf"tensor {NORM} has shape \[\]", NORM, torch.tensor(1.0)),
        (rf"tensor {NORM} is int8", NORM, torch.ones(64, dtype=torch.int8)),
        ("o_proj.bias", BIAS, torch.ones(64)),
    ],
    ids=["missing", "extra", "shape", "scalar", "int8", "unexpected bias"],
)
def test_a_tensor_that_does_not_fit_is_named(
    pattern: str, name: str, tensor: torch.Tensor | None, tmp_path: Path
) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama")
    edit_tensors(tmp_path / "model.safetensors", lambda t: t.pop(name) if tensor is None else t.update({name: tensor}))
    with pytest.raises(ConfigError, match=pattern) as caught:
        load(path)
    assert "\n" not in str(caught.value)


BROKEN_FILES = {
    "empty": b"",
    "header too long": struct.pack("<Q", 1 << 62) + b"{}",
    "header not json": struct.pack("<Q", 4) + b"nope",
    "cut": struct.pack("<Q", 63) + b'{"a":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}   ' + b"\0" * 8,
    "pickle": b"\x80\x04\x95\x0e\x00\x00\x00\x00\x00\x00\x00}\x94.",
}


@pytest.mark.parametrize("content", BROKEN_FILES.values(), ids=BROKEN_FILES.keys())
def test_a_broken_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors: is not a readable safetensors file"):
        load(path)


def test_no_safetensors_at_all(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="only safetensors checkpoints"):
        load(path)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"model.norm.weight": "../secret"}, {"model.norm.weight": 3}])
def test_a_bad_index_is_named(weight_map: object, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama", shards=2)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: "):
        load(path)


def test_a_missing_shard_and_a_tensor_the_index_invents_are_named(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama", shards=2)
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    first = min(listed["weight_map"].values())
    write_json(index, {"weight_map": {**listed["weight_map"], "model.invented": first}})
    with pytest.raises(ConfigError, match=rf"{first}: tensor model\.invented is missing"):
        load(path)
    write_json(index, listed)
    (tmp_path / first).unlink()
    with pytest.raises(ConfigError, match=rf"{first}: missing, though"):
        load(path)


# ---- where a user sees how far a checkpoint is loaded


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_log_has_a_line_every_few_seconds(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO):
        progress = LoadProgress(200, watched=False, clock=clock)
        for _ in range(5):
            clock.now_s += 0.5 * LINE_EVERY_S
            progress.update(10)
        progress.close()
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights: 20 of 200 tensors (10%) in 10 s",
        "loading weights: 40 of 200 tensors (20%) in 20 s",
    ]
    assert capsys.readouterr().err == ""


def test_a_log_that_a_display_reads_has_more_lines_and_no_bar(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO):
        progress = LoadProgress(4, watched=True, clock=clock)
        for _ in range(4):
            clock.now_s += WATCHED_EVERY_S
            progress.update(1)
        progress.close()
    assert [record.getMessage()[-12:] for record in caplog.records] == [
        *("(25%) in 1 s", "(50%) in 2 s", "(75%) in 3 s", "100%) in 4 s")
    ]
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar_and_no_lines(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with caplog.at_level(logging.INFO):
        progress = LoadProgress(2, watched=True, clock=clock)
        clock.now_s += 10 * LINE_EVERY_S
        progress.update(2)
        progress.close()
    assert "100%" in capsys.readouterr().err and caplog.records == []
