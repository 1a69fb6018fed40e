"""Rules for requests of web pages, in every HTTP server. Pure.

A page can send requests to any address, loopback included. Against other sites:

- Bodies must be JSON: without preflight, answered for allowed origins only, pages send text and
  forms.
- A changing request must not be cross-origin by `Origin` and `Sec-Fetch-Site`, as in Go's
  `http.CrossOriginProtection`.
- On loopback without keys, `Host` must be an address, localhost or a configured name, against DNS
  rebinding, which passes the second rule.

Allowed origins may read answers (CORS), with a key, without cookies.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from service.flags import ConfigError

# ---- Local addresses, and those that workers may connect to. Pure; names are text.

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
ANY_PORT = None


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`; False if unknown."""
    if host.lower().rstrip(".") == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def require_secret(
    host: str, *, flag: str, what: str, remedy: str, has_secret: bool, allow_insecure: bool
) -> str | None:
    """Raise ConfigError if strangers could reach `what`, or return a warning if allowed."""
    if has_secret or is_loopback(host):
        return None
    if allow_insecure:
        return (
            f"INSECURE: {what} listens on {host} and takes orders from every client that reaches it (--allow-insecure)"
        )
    raise ConfigError(
        f"{flag} {host}: {what} would take orders from every client that reaches it; set {remedy}, or --allow-insecure"
    )


@dataclass(frozen=True, slots=True)
class _Rule:
    network: Network | None
    name: str
    port: int | None

    def admits(self, host: str, address: Address | None, port: int) -> bool:
        if self.port not in (ANY_PORT, port):
            return False
        if self.network is not None:
            return address is not None and address.version == self.network.version and address in self.network
        return self.name == host


class AllowedAddresses:
    def __init__(self, rules: Sequence[str], *, loopback: bool, flag: str) -> None:
        """Parse rules: HOST, HOST:PORT, [IPV6]:PORT, or a network such as 10.0.0.0/8."""
        self._rules = tuple(_rule(text, flag) for text in rules)
        self._loopback = loopback

    def admits(self, host: str, port: int) -> bool:
        if self._loopback and is_loopback(host):
            return True
        name, address = host.lower().rstrip("."), _address(host)
        return any(rule.admits(name, address, port) for rule in self._rules)


def _address(host: str) -> Address | None:
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def _rule(text: str, flag: str) -> _Rule:
    host, port = _split(text, flag)
    try:
        network = ipaddress.ip_network(host.strip("[]"))
    except ValueError:
        if "/" in host or not host:
            raise ConfigError(f"{flag}: {text!r} is no HOST, HOST:PORT or network like 10.0.0.0/8") from None
        return _Rule(None, host.lower().rstrip("."), port)
    return _Rule(network, "", port)


def _split(text: str, flag: str) -> tuple[str, int | None]:
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not text.startswith("[")) or text.endswith("]"):
        return text, ANY_PORT
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"{flag}: {text!r}: the port must be between 1 and 65535")
    return host, int(port)


# ---- browser

ANY = "*"
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
CHANGING_PATHS = frozenset(("/flush_cache",))  # changing GET requests, as in SGLang
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_SHOWN_CHARS = 80

PREFLIGHT_HEADER = "Access-Control-Request-Method"
_ALLOWED = "Access-Control-Allow-Origin"
_READABLE = {"Access-Control-Expose-Headers": "X-Request-Id, Retry-After, X-Tandem-Ignored-Fields"}
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, DELETE",
    "Access-Control-Max-Age": "600",  # seconds; Chromium allows up to 7200
}
_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(?:, ?[\w!#$%&'*+.^`|~-]+)*", re.ASCII)  # header names in a list
_MAX_NAMES_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message with header, value and remedy."""

    status: int
    code: str
    message: str


class BrowserRule:
    def __init__(
        self,
        *,
        host: str,
        has_keys: bool,
        allowed_hosts: Sequence[str] = (),
        allowed_origins: Sequence[str] = (),
        key_flag: str = "--api-key-file",
    ) -> None:
        """`allowed_origins`: SCHEME://HOST[:PORT], "*" for any."""
        self._names = frozenset((host.lower().rstrip("."), *(_name_of(name) or name for name in allowed_hosts)))
        self._origins = frozenset(_checked(origin) for origin in allowed_origins)
        self._checks_host = is_loopback(host) and not has_keys and ANY not in self._names
        self._key_flag = key_flag

    def refusal(self, method: str, path: str, headers: Mapping[str, str], *, has_body: bool) -> Refusal | None:
        """Return why a request is refused, if so."""
        if self._checks_host and not self._is_own(headers.get("Host", "")):
            return self._foreign_host(headers["Host"])
        changes = method not in SAFE_METHODS or path in CHANGING_PATHS or is_preflight(method, headers)
        if changes and self._is_foreign(headers):
            return _foreign_origin(headers)
        if has_body and not is_json(headers.get("Content-Type", "")):
            return _not_json(headers.get("Content-Type", ""))
        return None

    def sharing(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """CORS headers of an answer."""
        if not self._origins:
            return {}
        if ANY in self._origins:
            return {_ALLOWED: ANY, **_READABLE}
        origin = headers.get("Origin", "")
        if origin.lower() not in self._origins:
            return {"Vary": "Origin"}
        return {_ALLOWED: origin, **_READABLE, "Vary": "Origin"}

    def preflight(self, method: str, headers: Mapping[str, str]) -> Mapping[str, str] | None:
        """Further headers of a preflight's answer, after `refusal`."""
        if not (self._origins and is_preflight(method, headers)):
            return None
        names = headers.get("Access-Control-Request-Headers", "")
        known = len(names) <= _MAX_NAMES_CHARS and _NAMES.fullmatch(names) is not None
        return {**_PREFLIGHT, "Vary": "Access-Control-Request-Headers"} | (
            {"Access-Control-Allow-Headers": names} if known else {}
        )

    def _is_own(self, host: str) -> bool:
        """Browsers always send it."""
        name = _name_of(host)
        return not name or name in self._names

    def _is_foreign(self, headers: Mapping[str, str]) -> bool:
        origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site", "")
        if site == "same-origin":  # also behind a proxy that changes Host
            return False
        if origin is None:
            return site not in ("", "none")  # "none": the address bar, or a bookmark
        if ANY in self._origins or origin.lower() in self._origins:
            return False
        return not _is_at(origin, headers.get("Host", ""))

    def _foreign_host(self, host: str) -> Refusal:
        name = _shown(_name_of(host))
        message = (
            f"Host: {_shown(host)} is no name of this server, which listens on loopback without {self._key_flag}; "
            f"use 127.0.0.1 or localhost, or add --allowed-hosts {name}"
        )
        return Refusal(403, "foreign_host", message)


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    return method == "OPTIONS" and PREFLIGHT_HEADER in headers


def is_json(content_type: str) -> bool:
    """Return whether it is application/json or application/*+json."""
    if content_type == "application/json":
        return True
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _not_json(content_type: str) -> Refusal:
    what = f"{_shown(content_type)} is not JSON" if content_type else "the header is missing"
    message = f"Content-Type: {what}; send the body with -H 'Content-Type: application/json'"
    return Refusal(415, "unsupported_media_type", message)


def _foreign_origin(headers: Mapping[str, str]) -> Refusal:
    origin = headers.get("Origin")
    origin_text = (
        f"Sec-Fetch-Site: {_shown(headers.get('Sec-Fetch-Site', ''))}"
        if origin is None
        else f"Origin: {_shown(origin)}"
    )
    message = f"{origin_text}: a web page of another site may not do this; --allowed-origins names the sites that may"
    return Refusal(403, "foreign_origin", message)


def _checked(origin: str) -> str:
    text = origin.lower().rstrip("/")
    if text not in (ANY, "null") and not text.partition("://")[2]:
        raise ConfigError(f"--allowed-origins: {origin!r} is no origin; write it as https://HOST[:PORT]")
    return text


def _is_at(origin: str, host: str) -> bool:
    """`origin`: scheme://host:port or "null"."""
    scheme, _, place = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme, "")
    return bool(place) and place.removesuffix(port) == host.lower().removesuffix(port)


@lru_cache(maxsize=256)
def _name_of(host: str) -> str:
    """A Host header's name, empty for an address or localhost."""
    host = host.strip().lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].rstrip(".")
    if name == "localhost" or name.endswith(".localhost") or _address(name) is not None:
        return ""
    return name


def _shown(value: str) -> str:
    return ascii(value[:_SHOWN_CHARS])
