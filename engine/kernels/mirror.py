"""Fields of a C structure as ctypes wants them: all our kernels' arguments are addresses, then whole numbers, then fp32."""

import ctypes
from collections.abc import Iterable


def fields(pointers: Iterable[str], numbers: Iterable[str], floats: Iterable[str] = ()) -> list[tuple[str, type]]:
    """`_fields_` of a mirror: void *, int64_t and float members, in this order."""
    kinds = ((pointers, ctypes.c_void_p), (numbers, ctypes.c_int64), (floats, ctypes.c_float))
    return [(name, kind) for names, kind in kinds for name in names]
