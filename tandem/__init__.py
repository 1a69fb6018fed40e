"""Tandem in Python: `LLM`, `AsyncLLM`, `Cluster` and `asgi.app` (docs/python.md).

Names are imported on use, so `import tandem` brings neither torch nor a server.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.flags import ConfigError
    from tandem.async_llm import AsyncLLM
    from tandem.cluster import Cluster
    from tandem.errors import EngineDeadError, RequestError, TandemError
    from tandem.llm import LLM
    from tandem.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput, ScoringOutput
    from tandem.params import SamplingParams

_NAMES = {
    "service.flags": ("ConfigError",),
    "tandem.async_llm": ("AsyncLLM",),
    "tandem.cluster": ("Cluster",),
    "tandem.errors": ("EngineDeadError", "RequestError", "TandemError"),
    "tandem.llm": ("LLM",),
    "tandem.outputs": ("CompletionOutput", "EmbeddingOutput", "Logprob", "RequestOutput", "ScoringOutput"),
    "tandem.params": ("SamplingParams",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Cluster",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EngineDeadError",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "TandemError",
]


def __getattr__(name: str) -> Any:
    if name == "asgi":
        return _imported("tandem.asgi")
    if name not in _MODULES:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}; it has {', '.join([*__all__, 'asgi'])}")
    globals()[name] = found = getattr(_imported(_MODULES[name]), name)
    return found


def _imported(module: str) -> ModuleType:
    """Raises ImportError: an extra is missing, or a file hides a package of ours."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        reason = _hidden(error.name or "")
        if reason is None:
            from service.extras import missing_module

            reason = missing_module(error)
        if reason is None:
            raise
        raise ModuleNotFoundError(f"{module}: {reason}", name=error.name) from None


def _hidden(name: str) -> str | None:
    package = name.partition(".")[0]
    ours = Path(__file__).parents[1] / package / "__init__.py"
    found = getattr(sys.modules.get(package), "__file__", None)
    if not found or not ours.exists() or ours.samefile(found):
        return None
    return f"{found} hides Tandem's package {package!r}; rename that file"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "asgi"})
