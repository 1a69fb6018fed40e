"""The one form of a path: ways to write it, and names that go through it unchanged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.http.request import plain_path, segment


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("/", "/"),
        ("*", "*"),
        ("", ""),
        ("/v1/models", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("//v1//models//", "/v1/models"),
        ("/v1/models/../../flush_cache", "/flush_cache"),
        ("/v1/models/%2e%2E/.%2e/flush_cache", "/flush_cache"),
        ("/v1/models/..%2f..%2Fflush_cache", "/flush_cache"),
        ("/v1/models/..\\..%5cflush_cache", "/flush_cache"),
        ("/v1/./models/x/..", "/v1/models"),
        ("/../../etc/passwd", "/etc/passwd"),
        ("/v1/models/%252e%252e%252fx", "/v1/models/%252e%252e%252fx"),  # decoded once
        ("/v1/models/a..b/...", "/v1/models/a..b/..."),
        ("/v1/models/org%2Fname", "/v1/models/org/name"),
        ("/v1/models/é%20a", "/v1/models/%C3%A9%20a"),
        ("/v1/models/%ff\udcff%f", "/v1/models/%FF%FF%25f"),
        ("/v1/models/a%0d%0ab%00", "/v1/models/a%0D%0Ab%00"),
        ("/v1/models/a%3Fb%23c", "/v1/models/a%3Fb%23c"),
    ],
)
def test_every_way_to_write_a_path_has_one_form(raw: str, plain: str) -> None:
    assert plain_path(raw) == plain == plain_path(plain)


@given(st.lists(st.sampled_from(["..", ".", "%2e", "%2E%2e", "%2f", "%5C", "\\", "/", "//", "a", "%25", "é", "%"])))
def test_no_way_leads_up(parts: list[str]) -> None:
    plain = plain_path("/" + "".join(parts))
    assert plain_path(plain) == plain and plain.isascii()
    assert plain == "/" or not {"", ".", ".."} & set(plain[1:].split("/"))


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_a_name_is_one_segment(name: str) -> None:
    written = segment(name)
    assert written.isascii() and not {"/", "\\", "?", "#", "%2e"} & set(written)
