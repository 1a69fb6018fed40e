"""Allowed hosts, ports and addresses of images. Pure."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from service.flags import ConfigError, FlagSet, flag
from service.security.browser import Address, AllowedAddresses

_UNICAST = ipaddress.ip_network("2000::/3")  # all assigned IPv6; excludes mapped IPv4 and NAT64 (64:ff9b::/96)
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
            *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3"),
            "168.63.129.16/32",  # Azure's agent; other clouds use link-local, shared or private addresses
            *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),  # Teredo, documentation, 6to4
        ),
    )
)


def is_public(address: Address) -> bool:
    """Return whether it is public. Not for IPv4 inside IPv6, which may be any host.

    By IANA's special addresses (RFC 6890), as `is_global` of `ipaddress` varies; also without
    multicast, IPv4 translations and tunnels, and a cloud service in public space.
    """
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST:
        return False
    return not any(address in network for network in _SPECIAL)


# ---- Flags of image fetching, for workers and routers.


@dataclass(frozen=True, kw_only=True)
class ImageFlags(FlagSet):
    topic = "images"

    disable_image_fetch: bool = flag(
        False, "fetch no images that requests name by http(s) URL: they bring data URLs or base64"
    )
    allowed_media_domains: tuple[str, ...] = flag(
        (),
        "hosts that images may be fetched from: HOST, *.DOMAIN, or HOST:PORT; default: any, at ports 80 and 443",
    )
    allowed_media_networks: tuple[str, ...] = flag(
        (),
        "addresses that images may be fetched from although they are not public, at any port or one: 10.0.0.0/8, 10.1.2.3:9000",
    )
    max_images_per_request: int = flag(64, "most images and frames of videos of a request", least=1, most=4096)


# ---- hosts

PORTS = (80, 443)
DOMAINS, NETWORKS = "--allowed-media-domains", "--allowed-media-networks"


@dataclass(frozen=True, slots=True)
class _Domain:
    """An allowed host. `suffix`: ".DOMAIN" of *.DOMAIN. Without `port` any of `PORTS`."""

    name: str
    suffix: str
    port: int | None

    def names(self, host: str) -> bool:
        return host.endswith(self.suffix) if self.suffix else host == self.name

    def admits(self, host: str, port: int) -> bool:
        return self.names(host) and (port in PORTS if self.port is None else port == self.port)


class AllowedHosts:
    """Raises ConfigError for an invalid rule."""

    def __init__(self, *, domains: Sequence[str], networks: Sequence[str]) -> None:
        self._domains = tuple(map(_domain, domains))
        self._networks = AllowedAddresses(networks, loopback=False, flag=NETWORKS)

    def refusal_of_name(self, host: str) -> str | None:
        """Return why the host is refused, if so."""
        if not self._domains or any(rule.names(host) for rule in self._domains):
            return None
        return f"{host[:100]!r} is not among the hosts of {DOMAINS}"

    def refusal_of_address(self, host: str, address: str, port: int) -> str | None:
        if self._networks.admits(address, port):
            return None
        if not is_public(ipaddress.ip_address(address)):
            return f"its host has no public address, and the server's own network is closed to it ({NETWORKS})"
        is_open = any(rule.admits(host, port) for rule in self._domains) if self._domains else port in PORTS
        return None if is_open else f"port {port} is not allowed, only {' and '.join(map(str, PORTS))} ({DOMAINS})"


def _domain(text: str) -> _Domain:
    name, colon, digits = text.lower().rpartition(":")
    if not colon or text.endswith("]") or (":" in name and not name.startswith("[")):
        name, digits = text.lower(), ""
    port = int(digits) if digits.isascii() and digits.isdigit() else None
    name = name.strip("[]").rstrip(".")
    suffix = name[1:] if name.startswith("*.") else ""
    bare = suffix or name
    if not bare.strip(".") or any(c in bare for c in "/*@ ") or (bool(digits) and not 0 < (port or 0) < 65536):
        raise ConfigError(f"{DOMAINS}: {text!r} is no HOST, *.DOMAIN or HOST:PORT")
    return _Domain(name, suffix, port)
