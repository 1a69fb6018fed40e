"""What a web page may ask of a server: the rule itself, told of a request's head. Wired at each server: tests/hostile."""

import pytest

from service.flags import ConfigError
from service.security.browser import BrowserRule, is_json

JSON = {"Content-Type": "application/json"}
HERE = {"Host": "127.0.0.1:8000"}


def rule(
    host: str = "127.0.0.1", *, has_keys: bool = False, hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()
) -> BrowserRule:
    return BrowserRule(host=host, has_keys=has_keys, allowed_hosts=hosts, allowed_origins=origins)


def status(made: BrowserRule, method: str, path: str, headers: dict[str, str], *, has_body: bool = False) -> int:
    refusal = made.refusal(method, path, headers, has_body=has_body)
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", " application/json ;a=b"],
)
def test_a_body_that_is_declared_as_json_is_taken(kind: str) -> None:
    assert is_json(kind) and status(rule(), "POST", "/generate", HERE | {"Content-Type": kind}, has_body=True) == 200


@pytest.mark.parametrize(
    "kind",
    [
        *("", "text/plain", "text/plain; application/json", "text/plain, application/json", "multipart/form-data"),
        *("application/x-www-form-urlencoded", "text/json", "application/jsonx", "image/svg+json", "\udcff"),
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "GET"])
def test_another_body_is_not_and_the_remedy_is_named(kind: str, method: str) -> None:
    refusal = rule().refusal(method, "/generate", HERE | {"Content-Type": kind}, has_body=True)
    assert refusal is not None and refusal.status == 415
    assert "-H 'Content-Type: application/json'" in refusal.message and refusal.message.isascii()


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/continue_generation", HERE),  # no body needs no type, and no browser sends no origin
        ("GET", "/dashboard", HERE | {"Sec-Fetch-Site": "cross-site"}),  # pages of other sites may look
        ("GET", "/dashboard", HERE | {"Sec-Fetch-Site": "none"}),
        ("GET", "/flush_cache", HERE | {"Sec-Fetch-Site": "none"}),
        ("GET", "/v1/models", {}),  # HTTP 1.0 may leave Host out
        # Behind a proxy that sends another Host the browser's word counts.
        ("POST", "/traces", HERE | {"Origin": "https://llm.example", "Sec-Fetch-Site": "same-origin"}),
    ],
)
def test_what_no_page_of_another_site_does_is_allowed(method: str, path: str, headers: dict[str, str]) -> None:
    assert status(rule(), method, path, headers) == 200


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://localhost:8000", "LocalHost:8000"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("http://127.0.0.1", "127.0.0.1:80"),
        ("https://127.0.0.1", "127.0.0.1"),
    ],
)
def test_a_page_of_the_server_s_own_may_change_it(origin: str, host: str) -> None:
    assert status(rule(), "POST", "/workers", {"Host": host, "Origin": origin}) == 200


@pytest.mark.parametrize(
    "said",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:3000"},
        {"Origin": "http://localhost:8000"},
        {"Origin": "https://127.0.0.1.evil.example:8000"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "\udcff"},
        {"Origin": "http://evil.example", "Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/workers"), ("DELETE", "/workers"), ("GET", "/flush_cache"), ("HEAD", "/flush_cache")],
)
def test_a_page_of_another_site_may_not(said: dict[str, str], method: str, path: str) -> None:
    refusal = rule().refusal(method, path, HERE | said | JSON, has_body=False)
    assert refusal is not None and (refusal.status, refusal.code) == (403, "foreign_origin")
    assert "--allowed-origins" in refusal.message and refusal.message.isascii()


def test_sites_that_are_allowed() -> None:
    allowed = rule(origins=("https://ops.example/", "null"))
    asked = HERE | {"Origin": "https://ops.example", "Sec-Fetch-Site": "cross-site"}
    assert status(allowed, "POST", "/workers", asked) == 200
    assert status(allowed, "POST", "/workers", HERE | {"Origin": "null"}) == 200
    assert status(allowed, "POST", "/workers", HERE | {"Origin": "https://other.example"}) == 403
    assert status(rule(origins=("*",)), "POST", "/workers", HERE | {"Origin": "https://other.example"}) == 200
    with pytest.raises(ConfigError, match=r"--allowed-origins: 'ops\.example' is no origin"):
        rule(origins=("ops.example",))


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "localhost", "LOCALHOST.:8000", "app.localhost:1"),
        *("192.0.2.7:8000", "[fe80::1%eth0]:8000", "", ":8000x"),  # the last ones name nothing
    ],
)
def test_addresses_and_localhost_are_no_foreign_hosts(host: str) -> None:
    assert status(rule(), "GET", "/v1/models", {"Host": host}) == 200
    assert status(rule("::1"), "GET", "/v1/models", {"Host": host}) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "\udcff", "[evil"]
)
def test_a_foreign_host_is_refused_on_loopback_without_keys(host: str) -> None:
    refusal = rule().refusal("GET", "/v1/models", {"Host": host}, has_body=False)
    assert refusal is not None and (refusal.status, refusal.code) == (403, "foreign_host")
    assert "--allowed-hosts" in refusal.message and "--api-key-file" in refusal.message and refusal.message.isascii()


def test_names_that_are_allowed() -> None:
    named = rule("localhost.", hosts=("LLM.example.", "proxy.example:8000"))
    for host in ("llm.example", "llm.example.:80", "Proxy.Example:9000"):
        assert status(named, "GET", "/v1/models", {"Host": host}) == 200
    assert status(named, "GET", "/v1/models", {"Host": "evil.example"}) == 403
    assert status(rule(hosts=("*",)), "GET", "/v1/models", {"Host": "evil.example"}) == 200


@pytest.mark.parametrize("made", [rule("0.0.0.0"), rule("10.0.0.1"), rule("gpu-box"), rule(has_keys=True)])
def test_with_keys_or_off_loopback_any_name_will_do(made: BrowserRule) -> None:
    """Services of a cluster have names that no server knows; strangers are turned away by keys there."""
    assert status(made, "GET", "/v1/models", {"Host": "router.prod.svc.cluster.local"}) == 200
    assert status(made, "POST", "/workers", {"Host": "router.prod", "Origin": "http://evil.example"}) == 403
    assert status(made, "POST", "/workers", {"Host": "router.prod", "Content-Type": "text/plain"}, has_body=True) == 415


OPS = {"Origin": "https://ops.example", "Sec-Fetch-Site": "cross-site"}
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.mark.parametrize(
    ("origins", "origin", "want"),
    [
        ((), "https://ops.example", {}),
        (("https://ops.example",), "https://ops.example", {"Access-Control-Allow-Origin": "https://ops.example"}),
        (("https://OPS.example/",), "https://ops.example", {"Access-Control-Allow-Origin": "https://ops.example"}),
        (("https://ops.example",), "https://evil.example", {}),
        (("https://ops.example",), "https://ops.example.evil", {}),
        (("https://ops.example",), "https://ops.example:444", {}),
        (("https://ops.example",), "http://ops.example", {}),
        (("https://ops.example",), "null", {}),
        (("https://ops.example",), "*", {}),
        (("https://ops.example",), "", {}),
        (("https://ops.example",), "https://ops.example, https://evil.example", {}),
        (("https://ops.example",), "\udcff", {}),
        (("null",), "null", {"Access-Control-Allow-Origin": "null"}),
        (("*",), "https://evil.example", {"Access-Control-Allow-Origin": "*"}),
    ],
)
def test_an_allowed_site_reads_answers_and_no_cookie_is_ever_allowed(
    origins: tuple[str, ...], origin: str, want: dict[str, str]
) -> None:
    made, asked = rule(origins=origins), HERE | {"Origin": origin}
    shared = dict(made.sharing(asked))
    assert "Access-Control-Allow-Credentials" not in {**shared, **(made.preflight("OPTIONS", asked | ASKS) or {})}
    assert shared.pop("Vary", "") == ("" if origins in ((), ("*",)) else "Origin")  # caches keep them apart
    assert shared.pop("Access-Control-Expose-Headers", "") == (
        "X-Request-Id, Retry-After, X-Tandem-Ignored-Fields" if want else ""
    )
    assert shared == want


def test_a_preflight_is_answered_for_allowed_sites_alone() -> None:
    allowed = rule(origins=("https://ops.example",))
    assert status(allowed, "OPTIONS", "/generate", HERE | OPS | ASKS) == 200
    told = allowed.preflight("OPTIONS", HERE | OPS | ASKS)
    assert told is not None and "POST" in told["Access-Control-Allow-Methods"]
    assert told["Access-Control-Allow-Headers"] == "authorization,content-type"
    for made, headers in ((allowed, {"Origin": "https://evil.example"}), (rule(), OPS), (rule(), {"Origin": "null"})):
        refusal = made.refusal("OPTIONS", "/generate", HERE | headers | ASKS, has_body=False)
        assert refusal is not None and (refusal.status, refusal.code) == (403, "foreign_origin")
    assert rule().preflight("OPTIONS", HERE | ASKS) is None  # an old route's own business
    assert allowed.preflight("OPTIONS", HERE | OPS) is None  # no question
    assert allowed.preflight("POST", HERE | OPS | ASKS) is None


@pytest.mark.parametrize(
    "names", ["", "a\r\nX-Injected: b", "a" * 5000, "a,,b", "a;b", "\udcff", "a b", "authorization, "]
)
def test_header_names_that_are_none_are_not_repeated(names: str) -> None:
    asked = HERE | OPS | ASKS | {"Access-Control-Request-Headers": names}
    told = rule(origins=("*",)).preflight("OPTIONS", asked)
    assert told is not None and "Access-Control-Allow-Headers" not in told


def test_rebinding_is_refused_with_any_allowed_origins() -> None:
    asked = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"} | ASKS
    for method in ("OPTIONS", "GET", "POST"):
        assert status(rule(origins=("*",)), method, "/v1/models", asked) == 403
