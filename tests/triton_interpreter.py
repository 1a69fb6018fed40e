"""Triton's interpreter, made bearable: import this before a kernel runs, in a process with TRITON_INTERPRET=1.

It computes the same. What is patched are the tables and types that Triton builds anew for each operation, how it compares and
joins their shapes, and the overflow of integers, which it works out and then drops (it asserts nothing unless asked to debug).
What it gets wrong and is right here: subnormal bfloat16 as float32, products of bfloat16, and e4m3.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from triton._utils import validate_block_shape
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_patched: set[int] = set()
_np_dtype_of_element = cache(interpreter._get_np_dtype)
_broadcast_value = TritonSemantic.broadcast_impl_value

Sizes = tuple[int, ...]


def _patch_once(fn: Any) -> Any:
    """Triton patches its language anew for each call of a device function: most of the time of a small kernel."""
    if id(fn.__globals__) not in _patched:
        _patched.add(id(fn.__globals__))
        _patch(fn)
    return interpreter._LangPatchScope()


def _np_dtype(of: core.dtype) -> np.dtype[Any]:
    element = of.element_ty if isinstance(of, core.block_type) else of
    return np.dtype(np.uint64) if isinstance(element, core.pointer_type) else _np_dtype_of_element(element)


def _sizes_of(shape: Sequence[Any]) -> Sizes:
    return tuple([size.value if type(size) is core.constexpr else size for size in shape])


@cache
def _block_shape(sizes: Sizes) -> tuple[core.tuple, int, str]:
    """The shape of a block type, its number of elements, and how its name begins."""
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    shape = core.tuple(sizes)
    return shape, validate_block_shape(shape), f"<{shape}, "


@cache
def _tensor_shape(sizes: Sizes) -> tuple[core.tuple, core.constexpr]:
    """The shape of a tensor and its number of elements."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(int(np.prod(sizes)))


def _init_block_type(self: core.block_type, element_ty: core.dtype, shape: Sequence[Any]) -> None:
    self.element_ty, self.sizes = element_ty, _sizes_of(shape)
    self.shape, self.numel, name = _block_shape(self.sizes)
    self.name = f"{name}{element_ty}>"


def _init_tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _tensor_shape(type.sizes if type.is_block() else ())


@cache
def _joined(one: Sizes, other: Sizes) -> Sizes:
    """The shape that both are broadcast to."""
    return tuple([b if a == 1 else a for a, b in zip(one, other, strict=True)])


def _broadcast(self: TritonSemantic, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
    """Of blocks of one rank; the rest, and what does not fit, is Triton's own."""
    if not (lhs.type.is_block() and rhs.type.is_block()):
        return _broadcast_value(self, lhs, rhs)  # type: ignore[no-any-return]
    one, other = lhs.type.sizes, rhs.type.sizes
    if one == other:
        return lhs, rhs
    if len(one) != len(other) or any(a != b and 1 not in (a, b) for a, b in zip(one, other, strict=True)):
        return _broadcast_value(self, lhs, rhs)  # type: ignore[no-any-return]
    joined = _joined(one, other)
    return _spread(self, lhs, joined), _spread(self, rhs, joined)


def _spread(semantic: TritonSemantic, value: core.tensor, sizes: Sizes) -> core.tensor:
    if value.type.sizes == sizes:
        return value
    handle = semantic.builder.create_broadcast(value.handle, sizes)
    return semantic.tensor(handle, core.block_type(value.type.scalar, sizes))


def _unwrapped(value: Any) -> Any:
    """Most values are neither a `constexpr` nor several."""
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind in _PLAIN else _unwrap(value)


_unwrap = core._unwrap_if_constexpr
_PLAIN = frozenset({int, float, bool, str, type(None), core.tensor, core.dtype, core.pointer_type, core.block_type})


def _same_type(self: core.dtype, other: Any) -> bool:
    return self is other or (isinstance(other := _unwrapped(other), core.dtype) and self.name == other.name)


def _converted(data: Any, of: core.dtype, to: core.dtype, rounding: Any) -> Any:
    if of == core.bfloat16 and to == core.float32:
        return data.view(np.uint16).astype(np.uint32) << 16
    if core.float8e4nv in (of, to):
        words = torch.from_numpy(np.ascontiguousarray(data)).view(_TORCH[of.name]).to(_TORCH[to.name])
        return words.view(_WORDS[words.element_size()]).numpy()
    return _convert_float(data, of, to, rounding)


def _dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    """float32 sums are exact before they are rounded: OpenBLAS adds in an order that depends on the CPU's kind and on a row's place."""
    if a.dtype.scalar == core.bfloat16:
        a, b = (self.cast_impl(x, core.float32) for x in (a, b))
    if d.data.dtype != np.float32 or a.dtype.primitive_bitwidth == 8:
        return _create_dot(self, a, b, d, *precision)
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


_TORCH = {"fp8e4nv": torch.float8_e4m3fn, "fp16": torch.float16, "fp32": torch.float32}
_WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_convert_float = interpreter._convert_float
_create_dot = interpreter.InterpreterBuilder.create_dot
builder = interpreter.interpreter_builder
builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
interpreter._patch_lang = _patch_once
interpreter._get_np_dtype = _np_dtype
interpreter._convert_float = _converted
interpreter.InterpreterBuilder.create_dot = _dot
core.block_type.__init__ = _init_block_type
core.tensor.__init__ = _init_tensor
core._unwrap_if_constexpr = _unwrapped
core.dtype.__eq__ = _same_type
TritonSemantic.broadcast_impl_value = _broadcast
