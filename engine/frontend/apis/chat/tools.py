"""`tools` and `tool_choice` of a chat: checks, the template's view, and the constraint on the answer. Pure.

A forced call (required, or a named function) is a JSON array [{"name": ..., "parameters": {...}}] for every model, as in
SGLang; calls by the model's choice are read by its family's parser (engine/text/tool_calls.py).
"""

import json
import re
from typing import Any

import msgspec

from engine.frontend.apis.shared.constraints import Constraint, closed_schema
from engine.sampling_params import GrammarSpec
from engine.text.call_formats import CallFormat
from service.http.errors import bad_field

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
CHOICES = ("none", "auto", "required")


class ToolFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`parameters`: JSON schema of the arguments. `strict`: a call by the model's own choice must match it too."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    function: ToolFunction
    type: str = "function"


class ChosenFunction(msgspec.Struct, kw_only=True):
    name: str


class ToolChoice(msgspec.Struct, kw_only=True):
    function: ChosenFunction
    type: str = "function"


def check_tools(tools: list[Tool] | None, choice: str | ToolChoice | None) -> None:
    tools = tools or []
    if len(tools) > MAX_TOOLS:
        raise bad_field("tools", f"at most {MAX_TOOLS}, got {len(tools)}")
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise bad_field(f"tools[{i}].type", f"only function is supported, got {tool.type!r}")
        if not NAME.fullmatch(tool.function.name):
            raise bad_field(f"tools[{i}].function.name", "must be 1 to 64 letters, digits, dots, dashes or underscores")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_field("tools", "two functions have the same name")
    if isinstance(choice, str) and choice not in CHOICES:
        raise bad_field("tool_choice", f"{choice!r} is not one of {', '.join(CHOICES)}, nor a function of tools")
    if choice == "required" and not tools:
        raise bad_field("tool_choice", "needs tools")
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise bad_field("tool_choice", f"{choice.function.name!r} is not among tools")


def usable(tools: list[Tool] | None, choice: str | ToolChoice | None) -> list[Tool]:
    if choice == "none":
        return []
    if isinstance(choice, ToolChoice):
        return [tool for tool in tools or [] if tool.function.name == choice.function.name]
    return tools or []


def forced(choice: str | ToolChoice | None) -> bool:
    return choice == "required" or isinstance(choice, ToolChoice)


def template_tools(tools: list[Tool]) -> list[dict[str, Any]] | None:
    return [msgspec.to_builtins(tool) for tool in tools] or None


def forced_calls(tools: list[Tool], *, only_one: bool) -> Constraint:
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        **({"maxItems": 1} if only_one else {}),
        "items": {"anyOf": [_call_schema(tool.function) for tool in tools]},
    }
    if definitions := _definitions(tools):
        schema["$defs"] = definitions
    return Constraint(GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False)), "tools")


def strict_calls(tools: list[Tool], format: CallFormat) -> Constraint | None:
    """Text in which a call, once begun, must match its function's schema; None when no function is strict or the format is no JSON."""
    if not (format.trigger and any(tool.function.strict for tool in tools)):
        return None
    tag = {
        "triggers": [format.trigger],
        "structures": [
            {
                "begin": format.begin.replace("NAME", tool.function.name),
                "schema": _parameters(tool.function) if tool.function.strict else {"type": "object"},
                "end": format.end,
            }
            for tool in tools
        ],
    }
    return Constraint(GrammarSpec("structural_tag", json.dumps(tag, ensure_ascii=False)), "tools")


def _call_schema(function: ToolFunction) -> dict[str, Any]:
    parameters = {k: v for k, v in _parameters(function).items() if k != "$defs"}
    return {
        "type": "object",
        "properties": {"name": {"enum": [function.name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _parameters(function: ToolFunction) -> dict[str, Any]:
    schema: dict[str, Any] = function.parameters or {"type": "object"}
    return closed_schema(schema, field="tools") if function.strict else schema


def _definitions(tools: list[Tool]) -> dict[str, Any]:
    """`#/$defs/X` is looked up at the root: the functions' definitions move there."""
    found: dict[str, Any] = {}
    for i, tool in enumerate(tools):
        definitions = _parameters(tool.function).get("$defs", {})
        for name, value in definitions.items() if isinstance(definitions, dict) else ():
            if found.setdefault(name, value) != value:
                raise bad_field(f"tools[{i}].function.parameters", f"another function defines $defs/{name} otherwise")
    return found
