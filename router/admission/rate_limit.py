"""Rate limits per client by token buckets. Pure."""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass, field

MAX_CLIENTS = 65536  # beyond it, the client that was quiet longest is forgotten
IPV6_SITE_BITS = 64  # prefix of one subscriber, a single client


@dataclass(slots=True)
class RateLimiter:
    """Token buckets: `per_s` requests a second, `burst` at once."""

    per_s: float
    burst: int
    _buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)  # name -> (tokens, at)

    def __post_init__(self) -> None:
        assert self.per_s > 0 and self.burst >= 1, (self.per_s, self.burst)

    def wait_s(self, client: str, now_s: float) -> float:
        """Take a token, or return the seconds until the next."""
        tokens, at_s = self._buckets.pop(client, (float(self.burst), now_s))
        tokens = min(float(self.burst), tokens + max(0.0, now_s - at_s) * self.per_s)
        missing = max(0.0, 1.0 - tokens)
        self._buckets[client] = (tokens if missing else tokens - 1.0, now_s)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return missing / self.per_s


def make_limiter(per_s: float, burst: int) -> RateLimiter | None:
    """Return a limiter, None without limit. The default burst is two seconds of requests."""
    return None if per_s <= 0 else RateLimiter(per_s, burst or max(1, round(2 * per_s)))


def client_of(remote: str | None) -> str:
    """Return the client at an address: IPv4 address or IPv6 site."""
    try:
        address = ipaddress.ip_address(remote or "")
    except ValueError:
        return remote or ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, IPV6_SITE_BITS), strict=False))
    return str(address)
