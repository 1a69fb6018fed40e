"""Metadata rows in host memory, for engines whose rows cross the control plane."""

import ctypes

from transfer_backends.contract import Region


def read_item(region: Region, index: int) -> bytes:
    return ctypes.string_at(_address(region, index), region.item_bytes)


def write_item(region: Region, index: int, data: bytes) -> None:
    assert len(data) == region.item_bytes, f"{len(data)} bytes for an item of {region.item_bytes}"
    ctypes.memmove(_address(region, index), data, len(data))


def _address(region: Region, index: int) -> int:
    assert region.device is None, "memory of a GPU"
    assert 0 <= index < region.num_items, f"item {index} of {region.num_items}"
    return region.base_ptr + index * region.item_bytes
