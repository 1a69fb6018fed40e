"""Chat messages to prompt text by the checkpoint's own Jinja template, in the sandbox that transformers documents under
"chat templating"."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.model_files.folder import ModelFolder, open_folder
from engine.text.template_reads import reads_of
from service.flags import ConfigError

_FAILURES = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError),
    *(ArithmeticError, AttributeError, RecursionError),
)  # of a template's code


class TemplateRefused(ValueError):
    """The template does not accept these messages; says why, often in the template's own words."""


class ChatTemplate:
    """`special_tokens`: bos_token and so on, which templates write into the text themselves. `reads`: what it reads of messages."""

    def __init__(self, source: str, *, special_tokens: dict[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self.source = source
        self.reads = reads_of(environment.parse(source))
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens or {}

    @property
    def knows_images(self) -> bool:
        """Whether it reads messages whose content is a list of parts, images among them."""
        return "image" in self.source

    def render(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, extra: dict[str, Any] | None = None
    ) -> str:
        """Prompt text. `extra`: template variables of the request (`chat_template_kwargs`). Raises TemplateRefused."""
        variables = {
            "tools": None,
            "documents": None,
            **(extra or {}),
            **self._special_tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(**variables)
        except _FAILURES as e:
            raise TemplateRefused(f"the model's chat template refused the messages: {e}") from None


def load_chat_template(
    model: str | Path | ModelFolder, *, special_tokens: dict[str, str], tools: bool = False
) -> ChatTemplate | None:
    """The template of `model` for requests with `tools`, or without; None: it has none. Raises ConfigError."""
    folder = open_folder(model)
    source = folder.template(tools=tools)
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens=special_tokens)
    except jinja2.TemplateSyntaxError as e:
        raise ConfigError(
            f"{folder.path}: the chat template has a syntax error in line {e.lineno}: {e.message}"
        ) from None


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: a mark for training, rendered as its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body, lineno=line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes for HTML; prompts want plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
