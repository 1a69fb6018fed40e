"""The served model: checkpoint, tokenizer, template, limits, defaults; its work with texts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.frontend.images.placeholders import NO_MARKS, Marks
from engine.lora.peft_config import lora_enabled
from engine.model_files.directory import ModelDirectory, open_directory
from engine.model_files.head_config import NOTHING, TOKENS, HeadConfig
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from engine.model_files.vision_config import VisionConfig
from engine.sampling_params import InvalidParam, SamplingParams, check_sampling_params
from engine.text.chat_template import ChatTemplate, load_chat_template
from engine.text.reasoning import REASONING_FORMATS, ReasoningFormat
from engine.text.tokenizer import Tokenizer, load_tokenizer
from service.flags import ConfigError
from service.http.errors import MAX_VALUES, ApiError, bad_field
from service.waiter import Aside

DEFAULT_MODEL_NAME = "recall"  # ships with Tandem
NO_TOKENIZER = "this server has no tokenizer (--skip-tokenizer-init)"
ANY_MODEL = ("", "default", "unknown")  # sglang-router writes "unknown" for no name


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """`loaded_tokenizer`: None with --skip-tokenizer-init. `info`: for /model_info.
    `tool_template`: for chats with tools, perhaps the same. `vision`, `marks`: of a multimodal
    model.
    """

    path: str
    served_name: str
    loaded_tokenizer: Tokenizer | None
    head: HeadConfig
    template: ChatTemplate | None
    tool_template: ChatTemplate | None
    vocab_size: int
    context_length: int
    sampling_defaults: Mapping[str, float | int]
    reasoning: ReasoningFormat | None
    info: Mapping[str, Any]
    lora: bool
    vision: VisionConfig | None = None
    marks: Marks = NO_MARKS

    @property
    def has_text(self) -> bool:
        return self.loaded_tokenizer is not None

    @property
    def generates(self) -> bool:
        return self.head.kind == TOKENS

    def check_generates(self) -> None:
        """Raises ApiError(404) without a head that generates."""
        if not self.generates:
            able = "/classify, /v1/rerank, /score and /v1/embeddings" if self.head.labels else "/v1/embeddings"
            message = f"this model has no head that generates tokens; it serves {able}"
            raise ApiError(404, message, code="model_has_no_head")

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError(400) without one; shared/ids_only.py rejects text bodies earlier."""
        if self.loaded_tokenizer is None:
            raise ApiError(400, f"{NO_TOKENIZER}; send input_ids to /generate", code="unsupported_parameter")
        return self.loaded_tokenizer

    @cached_property
    def template_names(self) -> frozenset[str]:
        templates = [template for template in (self.template, self.tool_template) if template is not None]
        return frozenset[str]().union(*(template.reads.names for template in templates))

    @property
    def own_names(self) -> tuple[str, ...]:
        return (*ANY_MODEL, self.served_name, self.path)


def load_served_model(engine: EngineConfig, *, mode: str) -> ServedModel:
    """Raises ConfigError for an unusable checkpoint."""
    path = engine.model_path or DEFAULT_MODEL_PATH
    folder = open_directory(path)
    config = load_model_config(folder)
    head = replace(config.head, kind=NOTHING) if engine.is_embedding and config.generates else config.head
    if mode == "decode" and head.kind != TOKENS:
        raise ConfigError(
            f"--disaggregation-mode decode: the model of {path} generates nothing, so nothing is decoded; "
            "start one worker for it: tandem serve without the flag, or tandem up --unified"
        )
    tokenizer = None if engine.skip_tokenizer_init else load_tokenizer(folder)
    template, tool_template = _templates(folder, tokenizer)
    served_name = engine.served_model_name or _name_of(path)
    return ServedModel(
        path=path,
        served_name=served_name,
        loaded_tokenizer=tokenizer,
        head=head,
        template=template,
        tool_template=tool_template,
        vocab_size=config.vocab_size,
        context_length=engine.context_length or config.max_position_embeddings,
        sampling_defaults=load_sampling_defaults(folder, vocab_size=config.vocab_size),
        reasoning=REASONING_FORMATS.get(engine.reasoning_parser or ""),
        info={
            "model_path": path,
            "served_model_name": served_name,
            "tokenizer_path": path,
            "is_generation": head.kind == TOKENS,
            "has_image_understanding": config.vision is not None,
            "model_type": config.model_type,
            "architectures": [config.architecture],
            "weight_version": engine.weight_version,
            "disaggregation_mode": mode,
        },
        lora=lora_enabled(engine.enable_lora, engine.lora_paths),
        vision=config.vision,
        marks=NO_MARKS if config.vision is None or tokenizer is None else _marks(config.vision, tokenizer),
    )


def _marks(vision: VisionConfig, tokenizer: Tokenizer) -> Marks:
    ids = (vision.image_token_id, vision.video_token_id, vision.start_token_id, vision.end_token_id)
    return Marks(*("" if id is None else tokenizer.token_text(id) for id in ids))


def _templates(folder: ModelDirectory, tokenizer: Tokenizer | None) -> tuple[ChatTemplate | None, ChatTemplate | None]:
    if tokenizer is None:
        return None, None
    template = load_chat_template(folder, special_tokens=tokenizer.special_tokens)
    if folder.template(tools=True) == folder.template(tools=False):
        return template, template
    return template, load_chat_template(folder, special_tokens=tokenizer.special_tokens, tools=True)


def load_sampling_defaults(model: str | ModelDirectory, *, vocab_size: int) -> dict[str, float | int]:
    """generation_config.json for OpenAI requests, as in SGLang and vLLM."""
    folder = open_directory(model)
    config = folder.generation.values()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {n: config[n] for n in names if isinstance(config.get(n), int | float) and not isinstance(config[n], bool)}
    if "top_k" in values:
        values["top_k"] = int(values["top_k"]) or -1  # transformers' 0 is "off"
    try:
        check_sampling_params(SamplingParams(**values), vocab_size=vocab_size)
    except InvalidParam as e:
        raise ConfigError(f"{folder.path}/generation_config.json: {e}") from None
    return values


def _name_of(model_path: str) -> str:
    if model_path == DEFAULT_MODEL_PATH:
        return DEFAULT_MODEL_NAME
    path = Path(model_path).resolve()
    return path.stem if path.is_file() else path.name


# ---- Texts of requests to tokens and back, in threads if long or many.

INLINE_CHARS = 2000  # shorter texts are tokenized inline: cheaper than a thread switch
GROUP_CHARS = 64 << 10  # of short texts per thread job, so that other requests get in between
HUGE_CHARS = 1 << 20  # such a text takes a second; only these wait for one another
# Per text, or `BYTES_PER_TOKEN` per token of a longer context: tokenizing takes some 70 times its memory.
MAX_TEXT_BYTES = 8 << 20
BYTES_PER_TOKEN = 8


class Texts:
    """Tokenizes and renders the texts of one model. `context_length`: in tokens."""

    def __init__(self, model: ServedModel, *, context_length: Callable[[], int]) -> None:
        self._model = model
        self._context_length = context_length
        self.tokenizing = Aside("tokenize", inline=INLINE_CHARS, huge=HUGE_CHARS, threads=2)
        self.rendering = Aside("render", inline=64 << 10, huge=1 << 20)

    @property
    def max_bytes(self) -> int:
        return max(MAX_TEXT_BYTES, BYTES_PER_TOKEN * self._context_length())

    def check_bytes(self, num_bytes: int, *, field: str) -> None:
        """Raises ApiError(400)."""
        if num_bytes > self.max_bytes:
            most = f"at most {self.max_bytes} are tokenized"
            raise bad_field(field, f"has {num_bytes} bytes of text; {most}; shorten it")

    def close(self) -> None:
        self.tokenizing.close()
        self.rendering.close()

    async def encode_all(
        self, texts: Iterable[str], *, field: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[list[int]]:
        """Tokenize texts, long or many in threads. Raises ApiError(400) naming `field`.

        Raises TooManyTokens above `most`, before tokenizing if the length suffices.
        """
        found, num_tokens = list[list[int]](), 0
        for group in _groups(texts):
            work = partial(self._encode_group, group, field=field, add_special_tokens=add_special_tokens, most=most)
            try:
                found += await self.tokenizing.run(work, size=sum(map(len, group)))
            except ValueError as e:
                raise bad_field(field, str(e)) from None
            num_tokens += sum(map(len, found[-len(group) :]))
            if num_tokens > MAX_VALUES:
                raise bad_field(field, f"one request may hold at most {MAX_VALUES} tokens of text; send fewer texts")
        return found

    def _encode_group(
        self, texts: list[str], *, field: str, add_special_tokens: bool, most: int | None
    ) -> list[list[int]]:
        encode = self._model.tokenizer.encode
        for text in texts:
            self._check_length(text, field=field, most=most)
        return [encode(text, add_special_tokens=add_special_tokens, most=most) for text in texts]

    def _check_length(self, text: str, *, field: str, most: int | None) -> None:
        """Raises TooManyTokens, or ApiError(400) for a text too long to tokenize."""
        if most is not None:
            self._model.tokenizer.check_length(text, most)
        if len(text) * 4 > self.max_bytes:
            self.check_bytes(len(text.encode(errors="surrogatepass")), field=field)

    async def decode_all(self, lists: Sequence[list[int]], *, skip_special_tokens: bool) -> list[str]:
        decode, size = self._model.tokenizer.decode, sum(map(len, lists))
        return await self.tokenizing.run(
            lambda: [decode(ids, skip_special_tokens=skip_special_tokens) for ids in lists], size=size
        )


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    group, size = list[str](), 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= GROUP_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group
