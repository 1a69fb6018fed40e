"""Flags of adapters. Never torch."""

from collections.abc import Sequence

from service.flags import ConfigError

MAX_NAME_CHARS = 256


def lora_enabled(enable: bool, paths: Sequence[str]) -> bool:
    return enable or bool(paths)


def named_paths(paths: Sequence[str]) -> dict[str, str]:
    """Map names to directories of `--lora-paths`. Raises ConfigError."""
    named: dict[str, str] = {}
    for entry in paths:
        name, equals, path = entry.partition("=")
        path = path if equals else entry
        if problem := name_problem(name):
            raise ConfigError(f"--lora-paths {entry}: the name {problem}")
        if not path:
            raise ConfigError(f"--lora-paths {entry}: names no directory; write NAME=DIRECTORY")
        if name in named:
            raise ConfigError(f"--lora-paths: two adapters are called {name!r}")
        named[name] = path
    return named


def name_problem(name: str) -> str | None:
    if not 0 < len(name) <= MAX_NAME_CHARS:
        return f"must have 1 to {MAX_NAME_CHARS} characters"
    if not name.isprintable() or name != name.strip():
        return "must be printable, without space around it"
    return None


def check_lora(paths: Sequence[str], *, max_loaded: int | None) -> None:
    """Raise ConfigError for bad names or too many adapters."""
    named = named_paths(paths)
    if max_loaded is not None and len(named) > max_loaded:
        raise ConfigError(f"--lora-paths: {len(named)} adapters are more than --max-loaded-loras {max_loaded}")
