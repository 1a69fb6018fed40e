"""Recognizes diffusion and audio models, for helpful errors."""

import json
import re
from pathlib import Path

from engine.model_files.fields import Fields
from service.flags import ConfigError

PIPELINE = "model_index.json"  # of diffusers, instead of config.json
CLASS = "_class_name"  # in it, and in the config.json of its parts
_SERVED = "Tandem serves models that generate text token after token (docs/models.md)"

# Patterns of classes and GGUF architectures.
_KINDS = (
    (
        "a diffusion language model, which fills in masked tokens",
        re.compile(r"llada|dream|diffucoder|sdar|fast_?dllm|rnd1|diffullama", re.I),
    ),
    (
        "a diffusion model of pictures or videos",
        re.compile(
            r"flux|stable.?diffusion|^sd[13x]|^aura$|^wan|unet|dit\b|dit(model|pipeline)|transformer[23]dmodel|autoencoder"
            r"|(?<!text)diffusion|pixart|hunyuan_?video|ltxv?|cogvideo|lumina|chroma|hidream|qwen_?image",
            re.I,
        ),
    ),
    (
        "an audio model, which listens or speaks",
        re.compile(
            r"whisper|audio|omni|tts|texttospeech|speech|asr|wav2vec|hubert|wavlm|seamless|moonshine|voxtral|ultravox|musicgen|encodec"
            r"|bark|vits|csm|^dia|parler|kokoro|mimi|moshi|phi4mm|phi4multimodal|minicpmo|gemma3n",
            re.I,
        ),
    ),
)
_AUDIO_FIELDS = ("audio_config", "audio_encoder_config", "audio_processor", "thinker_config", "talker_config")


def kind_of(name: str) -> str | None:
    return next((kind for kind, names in _KINDS if names.search(name)), None)


def check_pipeline(folder: Path) -> None:
    """Raise ConfigError for a diffusers pipeline."""
    file = folder / PIPELINE
    if not file.is_file() or (folder / "config.json").is_file():
        return
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    name = found.get(CLASS) if isinstance(found, dict) else None
    raise ConfigError(
        f"{file}: {name or 'this'} is a diffusion model of pictures or videos, which is not served here; {_SERVED}"
    )


def check_gguf(path: Path, architecture: str) -> None:
    """Raise ConfigError for an unsupported kind."""
    if (kind := kind_of(architecture)) is not None:
        raise ConfigError(
            f"{path}: general.architecture: {architecture} is {kind}, which is not served here; {_SERVED}"
        )


def other_kind(fields: Fields, names: list[str]) -> ConfigError | None:
    part = fields.get(CLASS)
    if isinstance(part, str) and not names:
        kind = kind_of(part) or "a part of a diffusion model"
        return fields.error(CLASS, f"{part} is {kind}, which is not served here; {_SERVED}")
    field, named = ("architectures", names[0]) if names else ("model_type", str(fields.get("model_type", "")))
    kind = kind_of(named)
    if kind is None and any(isinstance(fields.get(name), dict) for name in _AUDIO_FIELDS):
        kind = "an audio model, which listens or speaks"
    return None if kind is None else fields.error(field, f"{named} is {kind}, which is not served here; {_SERVED}")
