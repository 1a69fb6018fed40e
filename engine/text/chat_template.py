"""Chat messages to a prompt by a Jinja template, in transformers' sandbox."""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.model_files.directory import ModelDirectory, open_directory
from engine.text.template_reads import reads_of
from service.flags import ConfigError
from service.http.errors import object_of

_FAILURES = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError),
    *(ArithmeticError, AttributeError, RecursionError),
)  # errors of template code


class TemplateRefused(ValueError):
    """The template rejects the messages, often with its own message."""


class ChatTemplate:
    """`special_tokens`: variables such as bos_token. `reads`: how it uses messages."""

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
    model: str | Path | ModelDirectory, *, special_tokens: dict[str, str], tools: bool = False
) -> ChatTemplate | None:
    """Load the template for requests with or without `tools`, if any. Raises ConfigError."""
    folder = open_directory(model)
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


# ---- Template values that are both text and object or list.


class _Written:
    def __add__(self, other: Any) -> Any:
        return str(self) + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return other + str(self) if isinstance(other, str) else NotImplemented


class TextPart(_Written, dict[str, Any]):
    def __init__(self, text: str) -> None:
        super().__init__(type="text", text=text)

    def __str__(self) -> str:
        return str(self["text"])


class Parts(_Written, list[Any]):
    """Text has one line per part."""

    @classmethod
    def of_text(cls, text: str) -> "Parts":
        return cls([TextPart(text)])

    def __str__(self) -> str:
        return joined(self)

    def __bool__(self) -> bool:
        return any(str(part) if isinstance(part, TextPart) else True for part in self)

    def __contains__(self, item: object) -> bool:
        return item in str(self) if isinstance(item, str) else super().__contains__(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(str(self), name)


class CallArguments(_Written, dict[str, Any]):
    """Arguments of a call: the object in `text`, rendered as `text`; empty for other JSON."""

    def __init__(self, text: str) -> None:
        super().__init__(object_of(text.encode()))
        self._text = text

    @classmethod
    def of(cls, given: Any) -> "CallArguments":
        """`given`: JSON text, or the value."""
        if isinstance(given, str):
            return cls(given or "{}")
        return cls(json.dumps({} if given is None else given, ensure_ascii=False))

    def __str__(self) -> str:
        return self._text


def joined(parts: Iterable[Any]) -> str:
    return "\n".join(str(part) for part in parts if isinstance(part, TextPart))


REASONING = ("reasoning_content", "reasoning", "thinking")
_MARK = "CONTINUED-FROM-HERE "  # the space disappears if the template trims the message

Message = dict[str, Any]


def render_continued(
    render: Callable[[list[Message]], str], messages: list[Message], *, in_reasoning: bool
) -> tuple[str, str] | None:
    """The prompt up to the message, and the message's rendered end.

    `in_reasoning`: the message is unfinished reasoning; if the template omits it, continue its
    empty content. As in transformers, the message is rendered with a mark at its end, where the
    prompt is cut.
    """
    for message, end in _marked(messages[-1], in_reasoning):
        text = render([*messages[:-1], message])
        at = text.rfind(_MARK.rstrip())
        if at >= 0:
            return _split(text[:at] if text.startswith(_MARK, at) else text[:at].rstrip(), end)
    return None


def _marked(message: Message, in_reasoning: bool) -> Iterator[tuple[Message, str]]:
    if in_reasoning:
        written = {name: message[name] + _MARK for name in REASONING if name in message}
        yield message | written, message["reasoning_content"]
    content = "" if message["content"] is None else message["content"]
    if isinstance(content, str):
        yield message | {"content": content + _MARK}, content
    elif isinstance(content[-1], TextPart):
        end = content[-1]["text"]
        yield message | {"content": Parts([*content[:-1], TextPart(end + _MARK)])}, end


def _split(text: str, end: str) -> tuple[str, str]:
    end = end if text.endswith(end) else end.rstrip()
    same = 0
    while same < min(len(text), len(end)) and text[-1 - same] == end[-1 - same]:
        same += 1
    return text[: len(text) - same], text[len(text) - same :]
