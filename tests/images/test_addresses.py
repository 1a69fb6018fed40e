"""Which addresses and hosts images may be fetched from."""

import ipaddress

import pytest

from service.flags import ConfigError
from service.images.hosts import AllowedHosts, is_public

INSIDE = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.0.1", "169.254.169.254"),
    *(
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.1",
        "192.0.0.192",
        "192.0.2.1",
        "192.168.0.1",
        "198.18.0.1",
        "198.51.100.1",
    ),
    *(
        "203.0.113.1",
        "224.0.0.1",
        "233.252.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "168.63.129.16",
        "192.88.99.1",
    ),
    *("::", "::1", "::127.0.0.1", "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:8.8.8.8"),
    *("64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::1", "100::1", "2001::1", "2001:0:4136:e378::1", "2001:db8::1"),
    *("2001:2::1", "2002:7f00:1::", "2002:808:808::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1"),
    *("fe80::1%1", "fec0::1", "ff02::1", "ff0e::1"),
]
OUTSIDE = ["1.1.1.1", "8.8.8.8", "100.63.0.1", "172.32.0.1", "192.169.0.1", "2606:4700:4700::1111", "2a00:1450::200e"]


@pytest.mark.parametrize("address", INSIDE)
def test_addresses_inside(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", OUTSIDE)
def test_addresses_outside(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def may(hosts: AllowedHosts, host: str, address: str, port: int = 443) -> bool:
    return hosts.refusal_of_name(host) is None and hosts.refusal_of_address(host, address, port) is None


def test_every_public_host_is_allowed_at_two_ports() -> None:
    hosts = AllowedHosts(domains=(), networks=())
    assert may(hosts, "a.org", "8.8.8.8", 80) and may(hosts, "8.8.8.8", "8.8.8.8")
    assert not may(hosts, "a.org", "8.8.8.8", 8080) and not may(hosts, "a.org", "8.8.8.8", 22)
    assert not may(hosts, "a.org", "10.0.0.1")


def test_domains_narrow_what_is_allowed() -> None:
    hosts = AllowedHosts(domains=("A.org", "*.b.org", "c.org:8443", "[2606:4700::1]:444"), networks=())
    assert (
        may(hosts, "a.org", "8.8.8.8") and may(hosts, "x.y.b.org", "8.8.8.8") and may(hosts, "c.org", "8.8.8.8", 8443)
    )
    assert may(hosts, "2606:4700::1", "2606:4700::1", 444)
    for host in ("b.org", "xa.org", "a.org.evil", "evilb.org", "8.8.8.8"):
        assert not may(hosts, host, "8.8.8.8")
    assert not may(hosts, "c.org", "8.8.8.8", 443) and not may(hosts, "a.org", "8.8.8.8", 8443)
    assert not may(hosts, "a.org", "127.0.0.1") and not may(hosts, "x.b.org", "10.0.0.1")  # a name opens no network


def test_networks_open_addresses_inside() -> None:
    hosts = AllowedHosts(domains=(), networks=("10.1.0.0/16", "10.2.0.1:9000"))
    assert may(hosts, "store", "10.1.2.3", 1234) and may(hosts, "store", "10.2.0.1", 9000)
    assert not may(hosts, "store", "10.2.0.1", 80) and not may(hosts, "store", "10.3.0.1", 80)


@pytest.mark.parametrize("rule", ["", "*", "*.", "http://a.org", "a.org:0", "a.org:70000", "a.org/x", "a b", "x*.org"])
def test_rules_that_cannot_be_read(rule: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-media-domains"):
        AllowedHosts(domains=(rule,), networks=())
    with pytest.raises(ConfigError, match="--allowed-media-networks"):
        AllowedHosts(domains=(), networks=("10.0.0.0/33",))
