"""Triton's interpreter, made bearable: import this before a kernel runs, in a process with TRITON_INTERPRET=1."""

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang
_patched: set[int] = set()


def _patch_once(fn: Any) -> Any:
    """Triton patches its language anew for each call of a device function: most of the time of a small kernel."""
    if id(fn.__globals__) not in _patched:
        _patched.add(id(fn.__globals__))
        _patch(fn)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_once
