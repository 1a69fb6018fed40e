"""Public Internet addresses. Pure.

By IANA's special addresses (RFC 6890), as `is_global` of `ipaddress` varies; also without
multicast, IPv4 translations and tunnels, and a cloud service in public space.
"""

import ipaddress

from service.security.addresses import Address

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
    """Return whether it is public. Not for IPv4 inside IPv6, which may be any host."""
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST:
        return False
    return not any(address in network for network in _SPECIAL)
