"""Prefix cache namespaces: `cache_salt` (vLLM, SGLang), `extra_key` (SGLang). Pure."""

from typing import Protocol

from engine.frontend.apis.shared.fields import each
from service.http.errors import bad_field
from service.kv_events import MAX_NAMESPACE_CHARS, namespace_of

PerPrompt = str | list[str | None] | None  # one for all prompts, or one each


class NamespaceFields(Protocol):
    cache_salt: PerPrompt
    extra_key: PerPrompt


def namespaces_of(body: NamespaceFields, num_prompts: int) -> list[tuple[str, ...]]:
    """Raises ApiError(400)."""
    if body.cache_salt is None and body.extra_key is None:
        return [()] * num_prompts
    salts, keys = (_checked(name, getattr(body, name), num_prompts) for name in ("cache_salt", "extra_key"))
    return list(map(namespace_of, salts, keys))


def _checked(field: str, value: PerPrompt, num_prompts: int) -> list[str | None]:
    parts: list[str | None] = each(field, value, num_prompts)
    for part in parts:
        if part is not None and len(part) > MAX_NAMESPACE_CHARS:
            raise bad_field(field, f"must have at most {MAX_NAMESPACE_CHARS} characters, got {len(part)}")
    return parts
