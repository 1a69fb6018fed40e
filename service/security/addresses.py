"""Local addresses, and those that workers may connect to. Pure; names are text."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from service.flags import ConfigError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
ANY_PORT = None


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`; False if unknown."""
    if host.lower().rstrip(".") == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def is_network_address(host: str) -> bool:
    return _address(host) is not None


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
    """Allowed HOST:PORT pairs."""

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
