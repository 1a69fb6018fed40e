"""A prompt that ends within its last message, which the answer continues. Pure.

As transformers does: the template renders the message with a mark at its end, and the text is cut there. So the prompt holds all that
the template writes before the message and nothing of what it writes behind.
"""

from collections.abc import Callable, Iterator
from typing import Any

from engine.text.template_values import Parts, TextPart

REASONING = ("reasoning_content", "reasoning", "thinking")
_MARK = "CONTINUED-FROM-HERE "  # a template that trims the message drops the space

Message = dict[str, Any]


def render_continued(
    render: Callable[[list[Message]], str], messages: list[Message], *, in_reasoning: bool
) -> tuple[str, str] | None:
    """The prompt's text up to the message, and as much of the message as ends the prompt. None: the template does not write it.

    `in_reasoning`: the message is a reasoning that has not ended; if the template writes none, its empty content goes on.
    """
    for message, end in _marked(messages[-1], in_reasoning):
        text = render([*messages[:-1], message])
        at = text.rfind(_MARK.rstrip())
        if at >= 0:
            return _split(text[:at] if text.startswith(_MARK, at) else text[:at].rstrip(), end)
    return None


def _marked(message: Message, in_reasoning: bool) -> Iterator[tuple[Message, str]]:
    """The message with the mark, in each field that may be continued, and the text before the mark."""
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
    """`text` in two: the second is what it ends with of `end`."""
    end = end if text.endswith(end) else end.rstrip()
    same = 0
    while same < min(len(text), len(end)) and text[-1 - same] == end[-1 - same]:
        same += 1
    return text[: len(text) - same], text[len(text) - same :]
