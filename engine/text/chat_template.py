"""Chat messages to a prompt by a Jinja template, in transformers' sandbox."""

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
)  # errors of template code


class TemplateRefused(ValueError):
    """The template rejects the messages, often with its own message."""


class ChatTemplate:
    """The chat template of a model.

    `special_tokens`: variables such as bos_token. `reads`: how it uses messages.
    """

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
        """True if it accepts content as parts with images."""
        return "image" in self.source

    def render(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, extra: dict[str, Any] | None = None
    ) -> str:
        """Raises TemplateRefused. `extra`: `chat_template_kwargs`."""
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
    """Load the template for requests with or without `tools`, if any. Raises ConfigError."""
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
    """The tag `{% generation %}`, which marks text for training."""

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
    """Plain JSON; Jinja's own `tojson` escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
