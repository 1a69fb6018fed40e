"""Anthropic's messages as a ChatBody. Pure."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from engine.frontend.apis.anthropic.body import (
    Block,
    CacheControl,
    ImageSource,
    Message,
    MessagesBody,
    MessageToolChoice,
    OutputConfig,
    PlacedImage,
    PromptFields,
    Thinking,
    ToolDefinition,
)
from engine.frontend.apis.chat.body import ChatBody, ChatMessage, ContentPart, PlacedPart
from engine.frontend.apis.chat.plan import TOGGLES
from engine.frontend.apis.chat.tools import ChosenFunction, Tool, ToolChoice, ToolFunction
from engine.frontend.apis.shared.constraints import JsonSchemaFormat, ResponseFormat
from engine.frontend.apis.shared.request_body import own_fields
from service.http.errors import bad_field, check_choice, missing, unsupported

ROLES = ("user", "assistant", "system")
RESULT = "tool_result"
# type -> required fields. Encrypted content (redacted_thinking) is ignored.
_TEXT: dict[str, tuple[str, ...]] = {"text": ("text",)}
_SEEN: dict[str, tuple[str, ...]] = {**_TEXT, "image": ("source",)}
_BLOCKS: dict[str, dict[str, tuple[str, ...]]] = {
    "user": {**_SEEN, "tool_result": ("tool_use_id",)},
    RESULT: _SEEN,
    "assistant": {**_TEXT, "thinking": ("thinking",), "redacted_thinking": (), "tool_use": ("id", "name", "input")},
    "system": _TEXT,
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKS = {"enabled": True, "adaptive": True, "disabled": False}
_TTL_S = {"5m": 300.0, "1h": 3600.0}
# Our names -> Anthropic's, in errors.
NAMES = {
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "response_format": "output_config.format",
    ".json_schema.schema": ".schema",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}


def chat_of(body: PromptFields) -> ChatBody:
    """Raises ApiError(400) that names the field, like checks in `in_words_of(NAMES)`."""
    chat = ChatBody(
        messages=[
            *(_said("system", _blocks(body.system, "system", of="system")) if body.system else ()),
            *_messages(body.messages),
        ],
        model=body.model,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])] or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=False if body.tool_choice and body.tool_choice.disable_parallel_tool_use else None,
        continue_final_message=_continues(body.messages),
        **own_fields(body),
        **_output(body.output_config),
        chat_template_kwargs={**_thinking(body.thinking), **(body.chat_template_kwargs or {})} or None,
    )
    user = body.metadata.user_id if body.metadata else None
    chat.session_id = body.session_id or body.prompt_cache_key or user
    times_s = [_ttl_s(field, control) for field, control in _cached(body)]
    if chat.returns_within_s is None and times_s:
        chat.returns_within_s = max(times_s)
    return chat


def _cached(body: PromptFields) -> Iterator[tuple[str, CacheControl]]:
    places: list[tuple[str, Any]] = [("", body)]
    for name in ("system", "tools"):
        if isinstance(found := getattr(body, name), list):
            places += [(f"{name}[{i}].", one) for i, one in enumerate(found)]
    for i, message in enumerate(body.messages):
        if isinstance(message.content, list):
            places += [(f"messages[{i}].content[{j}].", block) for j, block in enumerate(message.content)]
    for field, place in places:
        if place.cache_control is not None:
            yield f"{field}cache_control.ttl", place.cache_control


def _ttl_s(field: str, control: CacheControl) -> float:
    check_choice(field, control.ttl or "5m", tuple(_TTL_S))
    return _TTL_S[control.ttl or "5m"]


def sampled_chat_of(body: MessagesBody, *, reasons: bool) -> ChatBody:
    """The chat, with sampling fields. `reasons`: else no budget of reasoning applies."""
    chat = chat_of(body)
    if reasons and body.thinking is not None:
        chat.thinking_token_budget = body.thinking.budget_tokens
    chat.max_tokens = body.max_tokens
    chat.stop = body.stop_sequences
    chat.stream = body.stream
    chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k or None  # 0: off
    return chat


def _messages(messages: list[Message]) -> Iterator[ChatMessage]:
    turn: list[list[Block]] = []
    for i, message in enumerate(messages):
        check_choice(f"messages[{i}].role", message.role, ROLES)
        turn.append(_blocks(message.content, f"messages[{i}].content", of=message.role))
        if i + 1 == len(messages) or messages[i + 1].role != message.role:
            said = list(chain.from_iterable(turn)) if message.role == "assistant" else _in_lines(turn)
            yield from _TURNS[message.role](said)
            turn = []


def _in_lines(turn: list[list[Block]]) -> list[Block]:
    """Join blocks; adjacent texts become lines of one, independent of the template."""
    found: list[Block] = []
    lines: list[str] = []  # of the last block, if text
    for number, block in ((number, block) for blocks in turn for number, block in enumerate(blocks)):
        if number or block.type != "text":
            found += _text_block(lines)
            lines = []
        if block.type == "text":
            lines.append(block.text or "")
        else:
            found.append(block)
    return found + _text_block(lines)


def _text_block(lines: list[str]) -> list[Block]:
    return [Block(type="text", text="\n".join(lines))] if lines else []


def _user_turn(blocks: list[Block]) -> Iterator[ChatMessage]:
    """Tool results become messages; texts and images between them keep their place."""
    said: list[Block] = []
    for block in blocks:
        if block.type != RESULT:
            said.append(block)
            continue
        yield from _said("user", said)
        said = []
        result = block.content or ""
        content = result if isinstance(result, str) else _parts(result)
        yield ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=content)
    yield from _said("user", said)


def _assistant_turn(blocks: list[Block]) -> Iterator[ChatMessage]:
    thinking = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if block.type == "tool_use"
    ]
    texts = [block for block in blocks if block.type == "text"]
    yield ChatMessage(
        role="assistant",
        content="".join(block.text or "" for block in texts) if texts or not calls else None,
        reasoning_content=thinking or None,
        tool_calls=calls or None,
    )


def _said(role: str, blocks: list[Block]) -> Iterator[ChatMessage]:
    if blocks:
        yield ChatMessage(role=role, content=_parts(blocks))


_TURNS: Mapping[str, Callable[[list[Block]], Iterator[ChatMessage]]] = {
    "user": _user_turn,
    "assistant": _assistant_turn,
    "system": partial(_said, "system"),
}


def _parts(blocks: list[Block]) -> str | list[ContentPart]:
    if len(blocks) == 1 and not isinstance(blocks[0], PlacedImage):
        return blocks[0].text or ""
    return [_part(block) for block in blocks]


def _part(block: Block) -> ContentPart:
    if isinstance(block, PlacedImage):
        return PlacedPart(type="image_url", image_url=block.url, is_base64=block.is_base64, field=block.field)
    return ContentPart(type="text", text=block.text)


def _blocks(content: str | list[Block], field: str, *, of: str) -> list[Block]:
    if isinstance(content, str):
        return [Block(type="text", text=content)]
    if not content and of != "assistant":  # assistant content may be empty
        raise bad_field(field, "must not be empty")
    known, found = _BLOCKS[of], []
    for i, block in enumerate(content):
        if block.type not in known:
            raise unsupported(f"{field}[{i}].type", f"{block.type!r} is not supported here, only {', '.join(known)}")
        for name in known[block.type]:
            if getattr(block, name) is None:
                raise bad_field(f"{field}[{i}].{name}", f"is missing in a block of type {block.type}")
        if block.source is not None:
            block = _image(block.source, f"{field}[{i}].source")
        elif block.content and isinstance(block.content, list):
            block.content = _blocks(block.content, f"{field}[{i}].content", of=RESULT)
        found.append(block)
    return found


def _image(source: ImageSource, field: str) -> PlacedImage:
    if source.type not in ("base64", "url"):
        raise unsupported(f"{field}.type", f"{source.type[:100]!r} is not supported, only base64 and url")
    url = source.url if source.type == "url" else source.data
    if url is None:
        raise missing(f"{field}.{'url' if source.type == 'url' else 'data'}")
    return PlacedImage(type="image", url=url, is_base64=source.type == "base64", field=field)


def _continues(messages: list[Message]) -> bool:
    first = len(messages)
    while first and messages[first - 1].role == "assistant":
        first -= 1
    for i in range(first, len(messages)):
        content = messages[i].content
        for j, block in enumerate(content if isinstance(content, list) else []):
            if block.type != "text":
                message = f"{block.type!r} cannot be in a last turn, which the answer continues, only text"
                raise bad_field(f"messages[{i}].content[{j}].type", message)
    return first < len(messages)


def _tool(tool: ToolDefinition, field: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise unsupported(
            f"{field}.type", f"{tool.type!r} is a tool of Anthropic's servers; only custom tools are supported"
        )
    if tool.defer_loading:
        raise unsupported(f"{field}.defer_loading", "is not supported by this server; leave it out")
    if tool.input_schema is None:
        raise missing(f"{field}.input_schema")
    return Tool(
        function=ToolFunction(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
    )


def _choice(choice: MessageToolChoice | None) -> str | ToolChoice | None:
    if choice is None:
        return None
    check_choice("tool_choice.type", choice.type, (*_CHOICES, "tool"))
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise missing("tool_choice.name")
    return ToolChoice(function=ChosenFunction(name=choice.name))


def _output(config: OutputConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    effort = {"reasoning_effort": config.effort} if config.effort else {}
    format = config.format
    if format is None:
        return effort
    if format.type != "json_schema":
        raise bad_field("output_config.format.type", f"{format.type!r} is not json_schema")
    schema = ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=format.schema_))
    return {**effort, "response_format": schema}


def _thinking(thinking: Thinking | None) -> dict[str, bool]:
    if thinking is None:
        return {}
    check_choice("thinking.type", thinking.type, _THINKS)
    return dict.fromkeys(TOGGLES, _THINKS[thinking.type])
