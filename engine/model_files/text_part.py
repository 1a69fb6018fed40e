"""The text configuration of a multimodal model."""

from typing import Any

from engine.model_files.fields import Fields
from engine.model_files.vision_config import seeing_family
from engine.model_files.vision_families import VisionFamily

TEXT = "text_config"
# Text architecture by `text_config`'s model_type.
_BY_TYPE = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_TEXT_ONLY = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}  # their vision part is ignored
_OUTSIDE = ("dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id")


def text_part(fields: Fields) -> Fields:
    """Return the text model's fields; text models unchanged. Raises ConfigError."""
    family, name = seeing_family(fields), _architecture(fields)
    if family is None and name not in _TEXT_ONLY:
        return fields
    inner = _inner(fields, name, is_flat=family is not None and family.flat)
    outside: dict[str, Any] = {key: fields.get(key) for key in _OUTSIDE if inner.get(key) is None}
    outside["tie_word_embeddings"] = _ties(fields, inner, either=family is not None and family.either_ties)
    inner = inner.with_values(**{key: value for key, value in outside.items() if value is not None})
    if family is None:
        return inner.with_values(architectures=[_TEXT_ONLY[name]])
    own = inner.with_defaults(family.text_fields).with_values(**family.fixed)
    return own.with_values(architectures=[_text_architecture(own, family)])


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _inner(fields: Fields, name: str, *, is_flat: bool) -> Fields:
    if isinstance(fields.get(TEXT), dict):
        return fields.inside(TEXT)
    if is_flat and fields.get("hidden_size") is not None:
        return fields
    raise fields.error(TEXT, f"{name} needs the fields of its text model there")


def _ties(fields: Fields, inner: Fields, *, either: bool) -> bool | None:
    flags = [
        of.flag("tie_word_embeddings", default=False)
        for of in (fields, inner)
        if of.get("tie_word_embeddings") is not None
    ]
    return (any(flags) if either else flags[0]) if flags else None


def _text_architecture(text: Fields, family: VisionFamily) -> str:
    if family.text:
        return family.text
    kind = text.text("model_type", default="llama")
    if kind not in _BY_TYPE:
        raise text.error(
            TEXT, f"model_type {kind} is not supported behind a vision tower; supported: {', '.join(_BY_TYPE)}"
        )
    return _BY_TYPE[kind]
