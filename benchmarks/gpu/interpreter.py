"""Triton's interpreter, made bearable: import this before a kernel runs, in a process with TRITON_INTERPRET=1.

It computes the same. What is patched are the tables and types that Triton builds anew for each operation, and the overflow of
integers, which it works out and then drops (it asserts nothing unless asked to debug).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from triton._utils import validate_block_shape
from triton.language import core
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_patched: set[int] = set()
_np_dtype_of_element = cache(interpreter._get_np_dtype)


def _patch_once(fn: Any) -> Any:
    """Triton patches its language anew for each call of a device function: most of the time of a small kernel."""
    if id(fn.__globals__) not in _patched:
        _patched.add(id(fn.__globals__))
        _patch(fn)
    return interpreter._LangPatchScope()


def _np_dtype(of: core.dtype) -> np.dtype[Any]:
    element = of.element_ty if isinstance(of, core.block_type) else of
    return np.dtype(np.uint64) if isinstance(element, core.pointer_type) else _np_dtype_of_element(element)


@cache
def _block_shape(sizes: tuple[int, ...]) -> tuple[core.tuple, int, str]:
    """The shape of a block type, its number of elements, and how its name begins."""
    shape = core.tuple(sizes)
    return shape, validate_block_shape(shape), f"<{shape}, "


@cache
def _tensor_shape(sizes: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
    """The shape of a tensor and its number of elements."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(int(np.prod(sizes)))


def _init_block_type(self: core.block_type, element_ty: core.dtype, shape: Sequence[Any]) -> None:
    sizes = tuple(core._unwrap_shape(shape))
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel, name = _block_shape(sizes)
    self.name = f"{name}{element_ty}>"


def _init_tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _tensor_shape(tuple(type.shape) if type.is_block() else ())


builder = interpreter.interpreter_builder
builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
interpreter._patch_lang = _patch_once
interpreter._get_np_dtype = _np_dtype
core.block_type.__init__ = _init_block_type
core.tensor.__init__ = _init_tensor
