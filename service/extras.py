"""Modules of this package's extras, and the command for missing ones."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from service.flags import PACKAGE, ConfigError

# Extra -> its modules; "|": any of them will do. Those of `ON_USE` are imported when a request, a model or a flag needs
# them, the others at start.
MODULES: Mapping[str, tuple[str, ...]] = {
    "engine": ("torch", "numpy", "tokenizers", "safetensors", "jinja2", "llguidance", "re2"),
    "nixl-cpu": ("nixl|nixl_cu12|nixl_cu13",),
    "nixl-cu13": ("nixl|nixl_cu12|nixl_cu13",),
    "mooncake-cpu": ("mooncake",),
    "mooncake-cu13": ("mooncake",),
    "plan": ("numpy", "re2"),
    "k8s": ("kubernetes", "aiohttp_retry"),
    "otel": ("opentelemetry",),
    "chat": ("prompt_toolkit",),
}
ON_USE: Mapping[str, tuple[str, ...]] = {
    "engine": ("PIL", "gguf", "huggingface_hub"),
    "plan": ("matplotlib",),
    "flashinfer": ("flashinfer",),
    "compiler": ("ziglang",),
}


def install(*extras: str) -> str:
    return f"pip install '{PACKAGE}[{','.join(extras)}]'"


def require(*extras: str) -> None:
    """Raise ConfigError if a module of `MODULES` is missing."""
    lacking = {extra: [name for name in MODULES[extra] if not _is_there(name)] for extra in extras}
    names = list(dict.fromkeys(name.partition("|")[0] for found in lacking.values() for name in found))
    if names:
        raise ConfigError(missing(names, *(extra for extra in extras if lacking[extra])))


def missing(names: Sequence[str], *extras: str) -> str:
    are = "are" if len(names) > 1 else "is"
    return f"{', '.join(names)} {are} not installed; run: {install(*extras)}"


def missing_module(error: ImportError) -> str | None:
    """An error for a module of an extra, else None."""
    name = (error.name or "").partition(".")[0]
    owners = [extra for table in (MODULES, ON_USE) for extra, names in table.items() if name in names]
    return missing([name], owners[0]) if owners else None


def _is_there(alternatives: str) -> bool:
    return any(_found(name) for name in alternatives.split("|"))


def _found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
