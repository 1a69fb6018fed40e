"""Chats rendered as a worker does, without one."""

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

from engine.frontend.apis.chat import plan
from engine.frontend.apis.chat.body import READER, ChatBody, ChatMessage
from engine.frontend.apis.chat.plan import check_chat, render_chat
from engine.frontend.images.placeholders import Marks
from engine.text.chat_template import ChatTemplate


def chat_body(messages: list[dict[str, Any]], **more: Any) -> ChatBody:
    """As it comes over HTTP, checked."""
    body, _ = READER.decode(json.dumps({"messages": messages, **more}).encode())
    check_chat(body)
    return body


def rendered(template: ChatTemplate, body: ChatBody) -> tuple[str, str]:
    """The prompt, and the beginning of the answer in it."""
    model = SimpleNamespace(template=template, marks=Marks(image="<image>"), tool_template=template)
    services: Any = SimpleNamespace(model=model)
    return render_chat(services, body)


def prompt_of(source: str, messages: list[dict[str, Any]], **more: Any) -> str:
    return "".join(rendered(template_of(source), chat_body(messages, **more)))


@cache
def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """For a template that reads contents as strings."""
    reads = template_of("{% for m in messages %}{{ m.content }}{% endfor %}").reads
    return plan.template_messages(messages, reads=reads, places={})
