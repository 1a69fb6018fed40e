"""Bodies of Ollama's API whose fields are wrong, and the field that the error must name: `test_every_door.py` plays them."""

from typing import Any

from tests.frontend.conftest import CONTEXT

CHAT, GENERATE, SHOW = "/api/chat", "/api/generate", "/api/show"
USER = [{"role": "user", "content": "x"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}

_OPTIONS: dict[str, list[Any]] = {
    **{"num_predict": [1.5, "many"], "temperature": [-1, "hot"], "top_p": [2], "top_k": ["x"], "min_p": [-1]},
    **{"repeat_penalty": [0], "presence_penalty": [9], "frequency_penalty": [-9], "seed": [2**63]},
    **{"stop": [[""], ["x"] * 100], "mirostat": [1], "tfs_z": [0.5], "typical_p": [0.5], "temprature": [1]},
}
_OF_BOTH: list[tuple[str, Any, str]] = [
    *(("model", value, "model") for value in (None, 5)),
    ("stream", "yes", "stream"),
    *(("format", value, "format") for value in (5, "xml")),
    *(("think", value, "think") for value in (5, "hard")),
    ("options", 5, "options"),
    *(("options", {name: value}, f"options.{name}") for name, values in _OPTIONS.items() for value in values),
    ("logprobs", True, "logprobs"),
    ("top_logprobs", 3, "top_logprobs"),
    ("priority", 2**40, "priority"),
    ("rid", "x" * 300, "rid"),
    ("n", 2, "n"),
]
_OF_A_CHAT: list[tuple[str, Any, str]] = [
    ("messages", 5, "messages"),
    ("messages", [{}], "messages[0].role"),
    ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content"),
    ("messages", [{"role": "user", "content": "x", "images": ["x"]}], "messages[0].images"),
    ("messages", [{"role": "user", "content": "x", "images": [5]}], "messages[0].images[0]"),
    ("messages", [{"role": "user", "content": "x" * CONTEXT}], "messages"),
    ("tools", [TOOL, TOOL], "tools"),
    ("tools", [{"type": "function", "function": {"name": "f g"}}], "tools[0].function.name"),
    ("tools", [{"function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
    ("temperature", 0.5, "temperature"),
]
_OF_A_PROMPT: list[tuple[str, Any, str]] = [
    ("prompt", 5, "prompt"),
    ("prompt", ["x"], "prompt"),
    ("raw", "yes", "raw"),
    ("suffix", "x", "suffix"),
    ("images", ["x"], "images"),
    ("template", "{{ .Prompt }}", "template"),
    ("context", [1], "context"),
    ("messages", USER, "messages"),
]
WRONG_OLLAMA: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, {"model": "tiny", "messages": USER, name: value}, field) for name, value, field in _OF_BOTH + _OF_A_CHAT),
    *((GENERATE, {"model": "tiny", "prompt": "x", name: value}, field)
      for name, value, field in _OF_BOTH + _OF_A_PROMPT),
    (GENERATE, {"model": "tiny", "prompt": "x" * CONTEXT, "raw": True}, "prompt"),
    (GENERATE, {"model": "tiny", "prompt": "x", "raw": True, "system": "s"}, "system"),
    *((SHOW, {"model": model}, "model") for model in (None, "", 5)),
]  # fmt: skip
