"""A response's body as a chat's. Pure."""

from engine.frontend.apis.chat.body import ChatBody, ChatMessage
from engine.frontend.apis.chat.tools import ChosenFunction, Tool, ToolChoice, ToolFunction
from engine.frontend.apis.responses.body import (
    MODES,
    Item,
    ResponseBody,
    ResponseTool,
    ResponseToolChoice,
    TextFormat,
    check_response,
)
from engine.frontend.apis.responses.items import check_calls, messages_of
from engine.frontend.apis.shared.constraints import JsonSchemaFormat, ResponseFormat
from engine.frontend.apis.shared.request import RequestFields
from service.http.errors import bad_field

_NOT_SHARED = frozenset(("response_format", "stream_options", "max_tokens", "rid", "n"))
_SHARED = tuple(name for name in RequestFields.__struct_fields__ if name not in _NOT_SHARED)
# Names in a chat's errors -> names here.
NAMES = {
    ".function.": ".",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


def to_chat(body: ResponseBody) -> ChatBody:
    """Raises ApiError(400) that names the body's own field."""
    check_response(body)
    tools, choice = _tools(body.tools or []), _choice(body.tool_choice)
    if isinstance(body.tool_choice, ResponseToolChoice) and body.tool_choice.type == "allowed_tools":
        tools, choice = _allowed(body.tool_choice, tools)
    return ChatBody(
        **{name: getattr(body, name) for name in _SHARED},
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs or None,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
        thinking_token_budget=body.thinking_token_budget,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text.format if body.text else None),
    )


def _messages(body: ResponseBody) -> list[ChatMessage]:
    own = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    instructions = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    messages = messages_of(body.history or (), field="history") + messages_of(own, field="input")
    if not messages:
        raise bad_field("input", "must not be empty")
    check_calls(messages)
    return instructions + messages


def _tools(tools: list[ResponseTool]) -> list[Tool]:
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _tool(tool: ResponseTool, field: str) -> Tool:
    if tool.type != "function":
        message = f"{tool.type[:100]!r} is not supported: this server runs no tools of its own; use function"
        raise bad_field(f"{field}.type", message, code="unsupported_parameter")
    if tool.name is None:
        raise bad_field(f"{field}.name", "is missing")
    function = ToolFunction(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(function=function)


def _choice(choice: str | ResponseToolChoice | None) -> str | ToolChoice | None:
    if choice is None or isinstance(choice, str) or choice.type == "allowed_tools":
        return choice if isinstance(choice, str) else None
    if choice.type != "function":
        message = f"{choice.type[:100]!r} is not supported; use function or allowed_tools"
        raise bad_field("tool_choice.type", message, code="unsupported_parameter")
    if choice.name is None:
        raise bad_field("tool_choice.name", "is missing")
    return ToolChoice(function=ChosenFunction(name=choice.name))


def _allowed(choice: ResponseToolChoice, tools: list[Tool]) -> tuple[list[Tool], str]:
    if choice.mode not in MODES:
        raise bad_field("tool_choice.mode", f"{choice.mode!r} is not one of {', '.join(MODES)}")
    named = [_tool(tool, f"tool_choice.tools[{i}]").function.name for i, tool in enumerate(choice.tools or [])]
    unknown = set(named) - {tool.function.name for tool in tools}
    if unknown or not named:
        raise bad_field("tool_choice.tools", f"{min(unknown)!r} is not among tools" if unknown else "must not be empty")
    return [tool for tool in tools if tool.function.name in named], choice.mode or "auto"


def _format(format: TextFormat | None) -> ResponseFormat | None:
    if format is None or format.type != "json_schema":
        return None if format is None else ResponseFormat(type=format.type)
    schema = JsonSchemaFormat(
        schema=format.schema, name=format.name, description=format.description, strict=format.strict
    )
    return ResponseFormat(type=format.type, json_schema=schema)
