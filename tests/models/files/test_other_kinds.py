"""Diffusion and audio models are refused by what they are; an unknown decoder keeps the list of what is served."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from engine.model_files.directory import kind_of
from engine.model_files.families import FAMILIES
from engine.model_files.model_config import load_model_config
from engine.model_files.vision_config import VISION_FAMILIES
from service.flags import ConfigError

LANGUAGE, PICTURES, AUDIO = "a diffusion language model", "a diffusion model of pictures or videos", "an audio model"
CLASSES = {
    LANGUAGE: ["LLaDAModelLM", "LLaDA2MoeModelLM", "DreamModel", "SDARForCausalLM", "Fast_dLLM_QwenForCausalLM"],
    PICTURES: ["StableDiffusion3Pipeline", "QwenImagePipeline", "HunyuanVideoModel"],
    AUDIO: [
        *(
            "WhisperForConditionalGeneration",
            "Qwen2AudioForConditionalGeneration",
            "Qwen2_5OmniForConditionalGeneration",
        ),
        *("Qwen3OmniMoeForConditionalGeneration", "Qwen3TTSForConditionalGeneration", "SpeechT5ForTextToSpeech"),
        *("ParlerTTSForConditionalGeneration", "Wav2Vec2ForCTC", "VoxtralForConditionalGeneration", "Qwen3ASRModel"),
    ],
}
DIFFUSERS = ["FluxPipeline", "StableDiffusionXLPipeline", "WanPipeline", "LTXPipeline"]
PARTS = ["FluxTransformer2DModel", "UNet2DConditionModel", "WanModel", "AutoencoderKL"]


def refused(folder: Path, file: str, fields: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / file).write_text(json.dumps(fields))
    with pytest.raises(ConfigError) as error:
        load_model_config(str(folder))
    return str(error.value)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in CLASSES.items() for name in names])
def test_a_class_of_another_kind_is_refused_as_such(tmp_path: Path, kind: str, name: str) -> None:
    said = refused(tmp_path, "config.json", {"architectures": [name]})
    assert said.startswith(f"{tmp_path}/config.json: architectures: {name} is {kind}"), said
    assert "not served here; Tandem serves models that generate text" in said and "\n" not in said


@pytest.mark.parametrize("name", DIFFUSERS)
def test_a_pipeline_is_refused_though_it_has_no_config(tmp_path: Path, name: str) -> None:
    said = refused(tmp_path, "model_index.json", {"_class_name": name})
    assert said.startswith(f"{tmp_path}/model_index.json: {name} is {PICTURES}"), said


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_pipeline_is_refused(tmp_path: Path, name: str) -> None:
    said = refused(tmp_path, "config.json", {"_class_name": name})
    assert said.startswith(f"{tmp_path}/config.json: _class_name: {name} is {PICTURES}"), said


def test_a_config_without_a_class_goes_by_its_type(tmp_path: Path) -> None:
    assert f"model_type: whisper is {AUDIO}" in refused(tmp_path, "config.json", {"model_type": "whisper"})


def test_an_unknown_class_that_listens_is_an_audio_model(tmp_path: Path) -> None:
    fields = {"architectures": ["NewForConditionalGeneration"], "audio_config": {"hidden_size": 8}}
    assert f"NewForConditionalGeneration is {AUDIO}" in refused(tmp_path, "config.json", fields)


def test_a_gguf_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path, writer = tmp_path / "model.gguf", gguf.GGUFWriter(str(tmp_path / "model.gguf"), "flux")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=f"^{path}: general.architecture: flux is {PICTURES}"):
        load_model_config(str(path))


def test_decoders_are_of_no_other_kind(tmp_path: Path) -> None:
    assert not [name for name in (*FAMILIES, *VISION_FAMILIES) if kind_of(name)]
    said = refused(tmp_path, "config.json", {"architectures": ["MambaForCausalLM"]})
    assert "MambaForCausalLM is not supported; supported: " in said
