"""`tools` and `tool_choice` of a chat: checks, template form, constraints.

A forced call (required or named) is a JSON array [{"name": ..., "parameters": {...}}], as in
SGLang; automatic calls use the model's parser (engine/text/tool_calls.py).
"""

import json
import re
from typing import Any

from engine.frontend.apis.shared.constraints import Constraint, closed_schema, moved_schema
from engine.sampling_params import GrammarSpec
from engine.text.parts import INPUT
from engine.text.tool_calls import CallFormat
from service.http.body import Body, optional, required
from service.http.errors import bad_field, check_choice, missing, plain, unsupported

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
CHOICES = ("none", "auto", "required")


class ToolFunction(Body):
    name: str = required("1 to 64 letters, digits, dots, dashes or underscores.", "get_weather")
    description: str | None = optional("What the function does, for the model.", "Weather of a city")
    parameters: dict[str, Any] | None = optional(
        "JSON schema of the arguments. Default: any object.",
        {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    )
    strict: bool | None = optional(
        "True: calls by the model's choice match the schema, too. Forced calls always do. Default false.", True
    )


class CustomGrammar(Body):
    syntax: str = required("Only regex.", "regex")
    definition: str = required("Regular expression that the text matches.", "[a-z]+")


class CustomFormat(Body):
    type: str = optional("text (any), or grammar.", "grammar", default="text")
    grammar: CustomGrammar | None = optional(
        "The grammar, for type grammar.", {"syntax": "regex", "definition": "[a-z]+"}
    )


class CustomTool(Body):
    """A tool with text input instead of JSON arguments."""

    name: str = required("1 to 64 letters, digits, dots, dashes or underscores.", "shell")
    description: str | None = optional("What the tool does, for the model.", "Runs a command")
    format: CustomFormat | None = optional("Format of the text. Default: any text.", {"type": "text"})


class Tool(Body):
    """A tool. `function`: for type custom, its form for the model (a function of one text)."""

    function: ToolFunction = optional(
        "The function, for type function.", {"name": "get_weather"}, default_factory=lambda: ToolFunction(name="")
    )
    type: str = optional("function, or custom (a tool that gets a text).", "function", default="function")
    custom: CustomTool | None = optional("The tool, for type custom.", {"name": "shell"})

    def model_post_init(self, context: Any) -> None:
        if self.custom is not None and self.type == "custom":
            self.function = _as_function(self.custom)


class ChosenFunction(Body):
    name: str = required("Name of one of tools.", "get_weather")


class AllowedTools(Body):
    """The template shows all tools, but only these may be called."""

    mode: str = required("auto (the model decides), or required (at least one call).", "auto")
    tools: "list[ToolChoice]" = required(
        "The tools that may be called, at least one.", [{"type": "function", "function": {"name": "get_weather"}}]
    )


class ToolChoice(Body):
    function: ChosenFunction = optional(
        "The function to call, for type function.",
        {"name": "get_weather"},
        default_factory=lambda: ChosenFunction(name=""),
    )
    type: str = optional("function, custom or allowed_tools.", "function", default="function")
    custom: ChosenFunction | None = optional("The tool to call, for type custom.", {"name": "shell"})
    allowed_tools: AllowedTools | None = optional(
        "The tools that may be called, for type allowed_tools.",
        {"mode": "auto", "tools": [{"function": {"name": "f"}}]},
    )

    def model_post_init(self, context: Any) -> None:
        if self.custom is not None and self.type == "custom":
            self.function = self.custom

    @property
    def names(self) -> list[str]:
        chosen = [self] if self.allowed_tools is None else self.allowed_tools.tools
        return [choice.function.name for choice in chosen]


AllowedTools.model_rebuild()


def check_tools(tools: list[Tool] | None, choice: str | ToolChoice | None) -> None:
    tools = tools or []
    if len(tools) > MAX_TOOLS:
        raise bad_field("tools", f"at most {MAX_TOOLS}, got {len(tools)}")
    for i, tool in enumerate(tools):
        _check_tool(tool, f"tools[{i}]")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_field("tools", "two functions have the same name")
    if isinstance(choice, str) and choice not in CHOICES:
        raise bad_field("tool_choice", f"{choice!r} is not one of {', '.join(CHOICES)}, nor a function of tools")
    if choice == "required" and not tools:
        raise bad_field("tool_choice", "needs tools")
    if isinstance(choice, ToolChoice):
        _check_choice(choice, names)


def _check_tool(tool: Tool, field: str) -> None:
    if tool.type not in ("function", "custom"):
        raise bad_field(f"{field}.type", f"only function and custom are supported, got {tool.type!r}")
    if not NAME.fullmatch(tool.function.name):
        raise bad_field(f"{field}.{tool.type}.name", "must be 1 to 64 letters, digits, dots, dashes or underscores")
    format = tool.custom.format if tool.custom is not None else None
    if format is None or format.type == "text":
        return
    if format.type != "grammar" or format.grammar is None:
        raise bad_field(f"{field}.custom.format", "must be of type text, or of type grammar with a grammar")
    if format.grammar.syntax != "regex":
        problem = (
            f"only regex is supported, got {format.grammar.syntax!r}; write the grammar as a regex, or leave it out"
        )
        raise bad_field(f"{field}.custom.format.grammar.syntax", problem)


def _check_choice(choice: ToolChoice, names: list[str]) -> None:
    check_choice("tool_choice.type", choice.type, ("function", "custom", "allowed_tools"))
    if choice.type == "allowed_tools" and choice.allowed_tools is None:
        raise missing("tool_choice.allowed_tools")
    if choice.type != "allowed_tools" and not choice.function.name:
        raise bad_field(f"tool_choice.{choice.type}", "is missing, or has no name")
    if choice.allowed_tools is not None and choice.allowed_tools.mode not in ("auto", "required"):
        raise bad_field(
            "tool_choice.allowed_tools.mode", f"must be auto or required, got {choice.allowed_tools.mode!r}"
        )
    if not choice.names:
        raise bad_field("tool_choice.allowed_tools.tools", "must not be empty")
    if unknown := [name for name in choice.names if name not in names]:
        raise bad_field("tool_choice", f"{unknown[0]!r} is not among tools")


def usable(tools: list[Tool] | None, choice: str | ToolChoice | None) -> list[Tool]:
    if choice == "none":
        return []
    if isinstance(choice, ToolChoice):
        return [tool for tool in tools or [] if tool.function.name in choice.names]
    return tools or []


def forced(choice: str | ToolChoice | None) -> bool:
    if isinstance(choice, ToolChoice) and choice.allowed_tools is not None:
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, ToolChoice)


def names_one(choice: str | ToolChoice | None) -> bool:
    """True if the answer is one call of one tool."""
    return isinstance(choice, ToolChoice) and choice.allowed_tools is None


def template_tools(tools: list[Tool]) -> list[dict[str, Any]] | None:
    """Transformers' form; custom tools become functions."""
    functions = [{n: value for n, value in plain(tool.function).items() if value is not None} for tool in tools]
    return [{"type": "function", "function": function} for function in functions] or None


def forced_calls(tools: list[Tool], *, only_one: bool) -> Constraint:
    """An array of calls, with renamed definitions at its root. Raises ApiError(400)."""
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool.function, definitions) for tool in tools]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        **({"maxItems": 1} if only_one else {}),
        "items": {"anyOf": calls},
        **({"$defs": definitions} if definitions else {}),
    }
    return Constraint(GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False)), "tools")


def strict_calls(tools: list[Tool], format: CallFormat) -> Constraint | None:
    """A constraint of calls within text, None without strict functions.

    Raises ApiError(400) for a strict function in a non-JSON format. Custom tools are free.
    """
    if not format.begin:
        refuse_strict(tools)
        return None
    if not any(tool.function.strict for tool in tools):
        return None
    tag = {
        "triggers": [format.marks[-1]],
        "structures": [
            {
                "begin": format.begin.replace("NAME", tool.function.name),
                "schema": _parameters(tool.function) if tool.function.strict else {"type": "object"},
                "after_number": format.after_number,
                "end": format.end,
            }
            for tool in tools
        ],
    }
    return Constraint(GrammarSpec("structural_tag", json.dumps(tag, ensure_ascii=False)), "tools")


def refuse_strict(tools: list[Tool]) -> None:
    """Raises ApiError(400) for a strict function."""
    for tool in tools:
        if tool.function.strict and tool.type == "function":
            raise unsupported(
                "tools",
                f"{tool.function.name!r} is strict, and the calls of this model's format are not held to a schema; "
                "leave strict out, or force the call (tool_choice)",
            )


def _call_schema(function: ToolFunction, definitions: dict[str, Any]) -> dict[str, Any]:
    parameters, own = moved_schema(_parameters(function), namespace=function.name, field="tools", of=_named(function))
    definitions |= own
    return {
        "type": "object",
        "properties": {"name": {"enum": [function.name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _parameters(function: ToolFunction) -> dict[str, Any]:
    schema: dict[str, Any] = function.parameters or {"type": "object"}
    return closed_schema(schema, field="tools", of=_named(function)) if function.strict else schema


def _named(function: ToolFunction) -> str:
    return f"the parameters of {function.name!r}: "


def _as_function(tool: CustomTool) -> ToolFunction:
    grammar = None if tool.format is None else tool.format.grammar
    text = {"type": "string"} if grammar is None else {"type": "string", "pattern": f"^(?:{grammar.definition})$"}
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return ToolFunction(
        name=tool.name, description=tool.description, parameters=schema, strict=None if grammar is None else True
    )
