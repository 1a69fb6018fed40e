"""Prompts that end inside the last message, which the answer continues.

As in transformers, the message is rendered with a mark at its end, where the prompt is cut.
"""

from collections.abc import Callable, Iterator
from typing import Any

from engine.text.template_values import Parts, TextPart

REASONING = ("reasoning_content", "reasoning", "thinking")
_MARK = "CONTINUED-FROM-HERE "  # the space disappears if the template trims the message

Message = dict[str, Any]


def render_continued(
    render: Callable[[list[Message]], str], messages: list[Message], *, in_reasoning: bool
) -> tuple[str, str] | None:
    """Return the prompt up to the message, and the message's rendered end.

    `in_reasoning`: the message is unfinished reasoning; if the template omits it, continue its
    empty content.
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
