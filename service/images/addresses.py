"""Which addresses are outside: hosts of the public Internet. Pure.

The table is IANA's registry of special addresses (RFC 6890): `is_global` of `ipaddress` differs between versions of Python. Beyond it: multicast,
addresses that lead to an IPv4 host by translation or a tunnel, and one of a cloud's own services that lies in public space.
"""

import ipaddress

from service.security.addresses import Address

_UNICAST = ipaddress.ip_network(
    "2000::/3"
)  # all of IPv6 that is given out; mapped IPv4 and NAT64 (64:ff9b::/96) are elsewhere
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
            *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3"),
            "168.63.129.16/32",  # Azure's agent; the services of other clouds are link-local, shared or private
            *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),  # Teredo, documentation, 6to4
        ),
    )
)


def is_public(address: Address) -> bool:
    """Whether it is that of a host on the public Internet. False for IPv4 inside IPv6: it may be any host."""
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST:
        return False
    return not any(address in network for network in _SPECIAL)
