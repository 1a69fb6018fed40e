"""Allowed hosts, ports and addresses of images. Pure."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from service.flags import ConfigError
from service.images.addresses import is_public
from service.security.addresses import AllowedAddresses

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
        """Return why its address is refused, if so."""
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
