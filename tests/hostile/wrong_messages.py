"""Bodies of Anthropic's API whose fields are wrong, and the field that the error must name: `test_every_door.py` plays them."""

from typing import Any

from tests.frontend.conftest import CONTEXT

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "x"}]
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
_OF_A_FILE = {"type": "image", "source": {"type": "file", "file_id": "x"}}
_BLOCKS: list[tuple[str, dict[str, Any], str]] = [
    ("assistant", {"type": "tool_use"}, "id"),
    ("assistant", {"type": "tool_use", "id": "t"}, "name"),
    ("assistant", {"type": "thinking", "thinking": "t"}, "type"),
    ("user", {"type": "tool_use"}, "type"),
    ("user", {"type": "text"}, "text"),
    ("user", _OF_A_FILE, "source.type"),
    ("user", {"type": "tool_result", "tool_use_id": "t", "content": [_OF_A_FILE]}, "content[0].source.type"),
]
_OF_A_PROMPT: list[tuple[str, Any, str]] = [
    ("messages", None, "messages"),
    ("messages", [], "messages"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "tool", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": [5]}], "messages[0].content[0]"),
    ("messages", [{"role": "user", "content": [IMAGE]}], "messages[0].content[0].source"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
    *(("messages", [*USER, {"role": role, "content": [block]}], f"messages[1].content[0].{field}")
      for role, block, field in _BLOCKS),
    ("messages", [{"role": "user", "content": []}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "tool_result"}]}], "messages[0].content[0].tool_use_id"),
    ("messages", [{"role": "user", "content": [{"type": "document"}]}], "messages[0].content[0].type"),
    ("system", 5, "system"),
    ("system", [IMAGE], "system[0].type"),
    ("model", 5, "model"),
    ("tools", {}, "tools"),
    ("tools", [{}], "tools[0].name"),
    ("tools", [{"name": "f"}], "tools[0].input_schema"),
    ("tools", [{"name": "web_search", "type": "web_search_20250305"}], "tools[0].type"),
    ("tools", [{**TOOL, "name": "f g"}], "tools[0].name"),
    ("tools", [{**TOOL, "defer_loading": True}], "tools[0].defer_loading"),
    ("tools", [TOOL, TOOL], "tools"),
    ("tools", [{**TOOL, "input_schema": []}], "tools[0].input_schema"),
    ("tool_choice", "any", "tool_choice"),
    ("tool_choice", {"type": "any"}, "tool_choice"),
    ("tool_choice", {"type": "required"}, "tool_choice.type"),
    ("tool_choice", {"type": "tool", "name": "g"}, "tool_choice"),
    ("tool_choice", {"type": "tool"}, "tool_choice.name"),
    ("thinking", {"type": "some"}, "thinking.type"),
    ("thinking", {"type": "enabled", "budget_tokens": "many"}, "thinking.budget_tokens"),
    ("output_config", {"format": {"type": "json_schema"}}, "output_config.format.schema"),
    ("output_config", {"format": {"type": "xml"}}, "output_config.format.type"),
    ("container", "c", "container"),
    ("metadata", "u", "metadata"),
    ("metadata", {"user_id": 5}, "metadata.user_id"),
    ("cache_control", {"type": "ephemeral", "ttl": "2h"}, "cache_control.ttl"),
    ("system", [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral", "ttl": 5}}], "system[0].cache_control.ttl"),
    ("tools", [{**TOOL, "cache_control": {"type": "ephemeral", "ttl": "1d"}}], "tools[0].cache_control.ttl"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "6m"}}]}],
     "messages[0].content[0].cache_control.ttl"),
    ("mcp_servers", [{"url": "x"}], "mcp_servers"),
    ("n", 2, "n"),
    ("min_p", 0.5, "min_p"),
    ("regex", "a", "regex"),
    ("response_format", {"type": "json_object"}, "response_format"),
]  # fmt: skip
_OF_SAMPLING: list[tuple[str, Any, str]] = [
    *(("max_tokens", value, "max_tokens") for value in (None, -1, "5", 1.5, True)),
    ("stop_sequences", "stop", "stop_sequences"),
    ("stop_sequences", [""], "stop_sequences"),
    ("stop_sequences", ["x"] * 100, "stop_sequences"),
    ("stop_sequences", [5], "stop_sequences[0]"),
    ("temperature", -0.5, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_k", -5, "top_k"),
    ("stream", "yes", "stream"),
    ("priority", 2**40, "priority"),
    ("rid", "x" * 300, "rid"),
    ("messages", [{"role": "user", "content": "x" * CONTEXT}], "messages"),
]
WRONG_MESSAGES: list[tuple[str, dict[str, Any], str]] = [
    (MESSAGES, {"max_tokens": 1}, "messages"),
    (MESSAGES, {"messages": USER}, "max_tokens"),
    *((COUNT, {"messages": USER, name: value}, field) for name, value, field in _OF_A_PROMPT),
    *((MESSAGES, {"messages": USER, "max_tokens": 1, name: value}, field)
      for name, value, field in (*_OF_A_PROMPT, *_OF_SAMPLING)),
]  # fmt: skip
