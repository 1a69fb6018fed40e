"""Reads the routes and the fields of bodies of SGLang and vLLM out of their wheels, by their syntax; nothing of them runs.

python -m tools.api_anchors sglang-0.5.23-*.whl vllm-0.33.0-*.whl
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ANCHORS = Path(__file__).with_suffix(".json")
METHODS = ("get", "post", "put", "delete", "patch")
# Folders of a wheel with routes, and where the bodies of a path are: "file:Class, ..."
ENTRYPOINTS = {"sglang": "sglang/srt/entrypoints/", "vllm": "vllm/entrypoints/"}
MOUNTED = ("/metrics", "/docs", "/openapi.json")  # by Starlette and FastAPI themselves
SKIPPED = ("/grpc", "/launchers/", "/rust_server/", "/cli/", "/test")
_SGLANG, _VLLM = "sglang/srt/entrypoints", "vllm/entrypoints"
BODIES: Mapping[str, Mapping[str, str]] = {
    "sglang": {
        "/v1/chat/completions": f"{_SGLANG}/openai/protocol.py:ChatCompletionRequest",
        "/v1/completions": f"{_SGLANG}/openai/protocol.py:CompletionRequest",
        "/v1/embeddings": f"{_SGLANG}/openai/protocol.py:EmbeddingRequest",
        "/v1/responses": f"{_SGLANG}/openai/protocol.py:ResponsesRequest",
        "/v1/messages": f"{_SGLANG}/anthropic/protocol.py:AnthropicMessagesRequest",
        "/v1/messages/count_tokens": f"{_SGLANG}/anthropic/protocol.py:AnthropicCountTokensRequest",
        "/api/chat": f"{_SGLANG}/ollama/protocol.py:OllamaChatRequest",
        "/api/generate": f"{_SGLANG}/ollama/protocol.py:OllamaGenerateRequest",
        "/tokenize": f"{_SGLANG}/openai/protocol.py:TokenizeRequest",
        "/detokenize": f"{_SGLANG}/openai/protocol.py:DetokenizeRequest",
        "/generate": "sglang/srt/managers/io_struct.py:GenerateReqInput",
        "/generate sampling_params": "sglang/srt/sampling/sampling_params.py:SamplingParams",
    },
    "vllm": {
        "/v1/chat/completions": f"{_VLLM}/openai/chat_completion/protocol.py:ChatCompletionRequest",
        "/v1/completions": f"{_VLLM}/openai/completion/protocol.py:CompletionRequest",
        "/v1/embeddings": f"{_VLLM}/pooling/embed/protocol.py:EmbeddingCompletionRequest",
        "/v1/responses": f"{_VLLM}/openai/responses/protocol.py:ResponsesRequest",
        "/v1/messages": f"{_VLLM}/anthropic/protocol.py:AnthropicMessagesRequest",
        "/v1/messages/count_tokens": f"{_VLLM}/anthropic/protocol.py:AnthropicCountTokensRequest",
        "/tokenize": f"{_VLLM}/serve/tokenize/protocol.py:TokenizeCompletionRequest",
        "/detokenize": f"{_VLLM}/serve/tokenize/protocol.py:DetokenizeRequest",
    },
}


def main(wheels: list[str]) -> None:
    anchors = {}
    for wheel in wheels:
        name, version, *_ = Path(wheel).name.split("-")
        anchors[name] = {"version": version, **read(name, zipfile.ZipFile(wheel))}
    ANCHORS.write_text(json.dumps(anchors, indent=1, sort_keys=True) + "\n")


def read(name: str, wheel: zipfile.ZipFile) -> dict[str, object]:
    """`routes`: path -> methods; `fields`: path -> names. Raises KeyError for a class that is not where it was."""
    files = {
        path: ast.parse(wheel.read(path)) for path in wheel.namelist() if path.endswith(".py") and _wanted(name, path)
    }
    classes = {node.name: node for tree in files.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    routes: dict[str, set[str]] = {path: {"GET"} for path in MOUNTED}
    for path, tree in files.items():
        if path.startswith(ENTRYPOINTS[name]):
            for method, route in _routes(tree):
                routes.setdefault(route, set()).add(method)
    fields = {}
    for route, place in BODIES[name].items():
        file, _, class_name = place.partition(":")
        own = {node.name: node for node in ast.walk(files[file]) if isinstance(node, ast.ClassDef)}
        fields[route] = sorted(set(_fields(own[class_name], classes | own)))
    return {"routes": {route: sorted(methods) for route, methods in sorted(routes.items())}, "fields": fields}


def _wanted(name: str, path: str) -> bool:
    files = {place.partition(":")[0] for place in BODIES[name].values()}
    folder = ENTRYPOINTS[name]
    return path in files or (path.startswith(folder) and not any(skipped in f"/{path}" for skipped in SKIPPED))


def _routes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(method, path) of FastAPI's decorators, and of its calls that do the same."""
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
            continue
        path, kind = _path_in(call.args[0]), call.func.attr
        if not path.startswith("/"):
            continue
        if kind in METHODS and call.func.value.__class__ is ast.Name:
            yield kind.upper(), path
        elif kind in ("api_route", "add_api_route"):
            listed = next((k.value for k in call.keywords if k.arg == "methods"), None)
            yield from ((method, path) for method in (ast.literal_eval(listed) if listed else ["GET"]))
        elif kind == "websocket":
            yield "WEBSOCKET", path


def _path_in(node: ast.expr) -> str:
    """A literal, or the default of a variable of the environment; "" for anything else."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.get" and len(node.args) == 2:
        node = node.args[1]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _fields(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Annotated names of a class and its bases."""
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes and base.id != node.name:
            yield from _fields(classes[base.id], classes)
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            is_constant = "ClassVar" in ast.unparse(part.annotation)
            if re.fullmatch("[a-z][a-z0-9_]*", part.target.id) and not is_constant:
                yield part.target.id


if __name__ == "__main__":
    main(sys.argv[1:])
