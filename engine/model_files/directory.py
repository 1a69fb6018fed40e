"""Files of a model directory or GGUF except weights.

Files may contradict each other; this module defines precedence.
"""

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from engine.gguf.file import GGUFFile, config_fields, open_gguf
from engine.model_files.fields import Fields, read_fields
from service.flags import ConfigError

TOKENIZER = "tokenizer.json"
DEFAULT, TOOL_USE = "default", "tool_use"
TEMPLATES = "additional_chat_templates"
# EOS tokens that Llama 3 checkpoints do not always name, as in SGLang.
_UNNAMED_ENDS = ("<|eom_id|>",)
# Only these classes read the BOS/EOS flags of tokenizer_config.json (as in SGLang).
_FLAG_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")


class AddedToken(msgspec.Struct, omit_defaults=True):
    """Arguments of `tokenizers.AddedToken`, without that package."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | msgspec.UnsetType = msgspec.UNSET
    special: bool = False


class ModelDirectory:
    """Read lazily. Raises ConfigError for a broken file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config(self) -> Fields:
        return read_fields(self.path / "config.json", required=True)

    @cached_property
    def generation(self) -> Fields:
        return read_fields(self.path / "generation_config.json", required=False)

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        """special_tokens_map.json wins without added_tokens_decoder, as in transformers.

        `add_bos_token`, `add_eos_token`: whether to add the token if tokenizer.json's template does
        not.
        """
        values = self._json("tokenizer_config.json")
        if "added_tokens_decoder" not in values:
            values |= self._json("special_tokens_map.json")
        has_flags = str(values.get("tokenizer_class", "")).removesuffix("Fast") in _FLAG_CLASSES
        return values | {
            "add_bos_token": has_flags and values.get("add_bos_token") is not False,
            "add_eos_token": has_flags and values.get("add_eos_token") is True and self._makes_vectors,
        }

    @cached_property
    def added_tokens(self) -> Mapping[int, AddedToken]:
        found = self.tokenizer_config.get("added_tokens_decoder") or {}
        try:
            return dict(sorted(msgspec.convert(found, dict[int, AddedToken], str_keys=True).items()))
        except msgspec.ValidationError:
            raise ConfigError(
                f"{self.path / 'tokenizer_config.json'}: added_tokens_decoder: must have tokens by id; download the file again"
            ) from None

    @cached_property
    def templates(self) -> Mapping[str, str]:
        """Chat templates by name. A default in a file replaces all of tokenizer_config.json."""
        files = self._template_files()
        return files if DEFAULT in files else _named(self.tokenizer_config.get("chat_template")) | files

    def template(self, *, tools: bool) -> str | None:
        names = (TOOL_USE, DEFAULT) if tools else (DEFAULT,)
        found = next((self.templates[name] for name in names if name in self.templates), None)
        return found or next(iter(self.templates.values()), None)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokenizer's EOS ids; `ModelConfig.eos_token_ids` has those of all files."""
        named = content_of(self.tokenizer_config.get("eos_token"))
        ids = (self._token_ids.get(text) for text in (named, *_UNNAMED_ENDS))
        return tuple(dict.fromkeys(id for id in ids if id is not None))

    @cached_property
    def _makes_vectors(self) -> bool:
        """True for an embedding model. Only its prompts may end in EOS."""
        named = read_fields(self.path / "config.json", required=False).architecture()
        return (self.path / "modules.json").is_file() or named.endswith("Model")

    @cached_property
    def _token_ids(self) -> Mapping[str, int]:
        named = {token.content: id for id, token in self.added_tokens.items()}
        return named | _ids_of(self.path / TOKENIZER, content_of(self.tokenizer_config.get("eos_token")))

    def _template_files(self) -> dict[str, str]:
        found = {file.stem: _text(file) for file in sorted((self.path / TEMPLATES).glob("*.jinja"))}
        if (file := self.path / "chat_template.jinja").is_file():
            return found | {DEFAULT: _text(file)}
        # A processor's default; without a tool template, vLLM takes the tokenizer's.
        source = self._json("chat_template.json").get("chat_template")
        if not isinstance(source, str):
            return found
        named = _named(self.tokenizer_config.get("chat_template"))
        own = named.get(TOOL_USE) or named.get(DEFAULT)
        return ({TOOL_USE: own} if own else {}) | found | {DEFAULT: source}

    def _json(self, name: str) -> dict[str, Any]:
        return read_fields(self.path / name, required=False).values()


class GGUFFolder(ModelDirectory):
    """The same facts from GGUF metadata; its config has all EOS ids."""

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file.path)
        self.file = file

    @cached_property
    def config(self) -> Fields:
        return Fields(self.path, config_fields(self.file))

    @cached_property
    def generation(self) -> Fields:
        return Fields(self.path, {})

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        from engine.gguf.tokenizer import gguf_tokenizer_config

        return gguf_tokenizer_config(self.file)

    @cached_property
    def templates(self) -> Mapping[str, str]:
        return _named(self.tokenizer_config.get("chat_template"))

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        return ()


def open_directory(model: str | Path | ModelDirectory) -> ModelDirectory:
    """Raises ConfigError."""
    if isinstance(model, ModelDirectory):
        return model
    path = Path(model)
    if path.is_file():
        return GGUFFolder(open_gguf(path))
    if path.is_dir():
        return ModelDirectory(path)
    raise ConfigError(
        f"--model-path {model}: no such directory or file; give a checkpoint directory, a .gguf file, "
        "a model of the Hugging Face hub (ORGANIZATION/NAME), smollm2, or recall-wide"
    )


def content_of(token: Any) -> str:
    return token if isinstance(token, str) else str(token.get("content", "")) if isinstance(token, dict) else ""


def _named(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {DEFAULT: value}
    pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        pairs = ((one.get("name"), one.get("template")) for one in value if isinstance(one, dict))
    return {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{file}: cannot be read as UTF-8; download the file again") from None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")


def _ids_of(file: Path, text: str) -> dict[str, int]:
    try:
        read = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
        found = {token.content: token.id for token in read.added_tokens}
        if text and text not in found:
            vocab = msgspec.json.decode(read.model, type=_Model).vocab
            ids = vocab if isinstance(vocab, dict) else {token: id for id, (token, _) in enumerate(vocab)}
            found |= {text: ids[text]} if text in ids else {}
    except (OSError, UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return {}
    return found


# ---- Recognizes diffusion and audio models, for helpful errors.

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
