"""The layout that workers name for routers."""

import json

import msgspec
import pytest

from service.kv_layout import Layout, layout_conflict, read_layout, write_layout

LAYOUT = Layout(14, "nixl", "Qwen3/L2", 16, "bfloat16", "off", 2, (4096, 4096), (("window", 512),))


def test_what_a_worker_writes_is_what_a_router_reads() -> None:
    found = read_layout({"kv_layout": write_layout(LAYOUT)})
    assert found is not None and msgspec.structs.asdict(found) == msgspec.structs.asdict(LAYOUT)
    assert layout_conflict(LAYOUT, found, me="p", them="d") is None
    other = msgspec.structs.replace(LAYOUT, page_size=32)
    assert layout_conflict(other, found, me="p", them="d") == (
        "page_size differs: p has 32, d has 16; start both workers with one --page-size"
    )


def test_a_later_version_may_name_more() -> None:
    text = json.dumps({**json.loads(write_layout(LAYOUT)), "version": 15, "stripes": 3})
    found = read_layout({"kv_layout": text})
    assert found is not None and found.version == 15


@pytest.mark.parametrize("info", [None, [], {}, {"kv_layout": None}, {"kv_layout": {}}, *(
    {"kv_layout": text} for text in ("", "{", "[" * 99999, "[14]", "{}", '{"version": "x"}', "\ud800")
)])  # fmt: skip
def test_what_names_no_layout_is_none(info: object) -> None:
    assert read_layout(info) is None
