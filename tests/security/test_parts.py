"""Keys, addresses, signatures, vouchers, limits: with literals, and files where files are the point."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.frontend.bootstraps import BootstrapAllowlist
from engine.messages import FAKE_BOOTSTRAP_HOST, Bootstrap
from router.client.credentials import Credentials
from router.parts.admission import MAX_CLIENTS, RateLimiter, client_of, make_limiter
from service.flags import ConfigError
from service.http.errors import ApiError, deeper_than
from service.security.browser import AllowedAddresses, is_loopback, require_secret
from service.security.keys import (
    PERIOD_S,
    Access,
    Call,
    KeyGate,
    KeyRing,
    Signer,
    Verdict,
    Verifier,
    authorization_of,
    bearer,
    derive,
    is_vouched,
    open_gate,
    read_secret_file,
    vouch,
)

SECRET = b"sixteen bytes or more"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.0.1", "::1", "localhost", "LocalHost.", "[::1]", "::ffff:127.0.0.1"]
)
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "127.0.0.1.nip.io", "2130706433", "localhost.evil"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)
    asked: dict[str, Any] = {"flag": "--host", "what": "it", "remedy": "--key", "has_secret": False}
    with pytest.raises(ConfigError, match=r"--host .*--key.*--allow-insecure"):
        require_secret(host, **asked, allow_insecure=False)
    assert "INSECURE" in (require_secret(host, **asked, allow_insecure=True) or "")
    assert require_secret(host, **{**asked, "has_secret": True}, allow_insecure=False) is None


RULES = ("10.1.0.0/16", "10.9.9.9:8998", "Prefill-0.svc", "prefill-1:7000", "[fd00::1]:5", "fd01::/16")
ADMITTED = [
    *(("10.1.2.3", 1), ("10.9.9.9", 8998), ("prefill-0.SVC.", 80), ("prefill-1", 7000)),
    *(("fd00::1", 5), ("fd01::9", 6), ("::ffff:10.1.2.3", 4)),
]
NOT_ADMITTED = [
    *(("10.2.0.1", 1), ("10.9.9.9", 8999), ("prefill-0.svc.evil", 80), ("prefill-1", 7001), ("fd00::1", 6)),
    *(("127.0.0.1", 80), ("169.254.169.254", 80), ("0x0a010203", 1), ("10.1.2.3@evil", 1)),
]


def test_addresses_that_may_be_dialled() -> None:
    allowed = AllowedAddresses(RULES, loopback=False, flag="--f")
    assert all(allowed.admits(*a) for a in ADMITTED) and not any(allowed.admits(*a) for a in NOT_ADMITTED)
    local = AllowedAddresses((), loopback=True, flag="--f")
    assert local.admits("127.0.0.1", 1) and not local.admits("10.1.2.3", 1)
    for bad in ("10.0.0.0/40", "host:0", "host:70000", "host:x", "", "10.0.0.1/8"):
        with pytest.raises(ConfigError, match="--f"):
            AllowedAddresses((bad,), loopback=False, flag="--f")


def test_bootstrap_allowlist() -> None:
    """Known, vouched for, or refused; a voucher is good for its address and rooms alone."""
    named = [Bootstrap(host="10.0.0.7", port=8998, room=room) for room in (5, 6)]
    places = BootstrapAllowlist(AllowedAddresses((), loopback=False, flag="--f"), secret=SECRET)
    good = vouch(SECRET, host="10.0.0.7", port=8998, rooms=[5, 6])
    places.check(named, voucher=good)
    places.check([Bootstrap(host=FAKE_BOOTSTRAP_HOST, port=1, room=1), None], voucher="")
    BootstrapAllowlist().check(named, voucher="")  # a worker that dials none asks nothing
    for voucher, bootstraps in (
        ("", named),
        (good, named[:1]),
        (good, [Bootstrap(host="10.0.0.8", port=8998, room=room) for room in (5, 6)]),
        (good, [Bootstrap(host="10.0.0.7", port=22, room=room) for room in (5, 6)]),
        (vouch(b"another secret..", host="10.0.0.7", port=8998, rooms=[5, 6]), named),
        ("é" * 64, named),
    ):
        with pytest.raises(ApiError, match=r"bootstrap_host: .*--disaggregation-bootstrap-allowed") as caught:
            places.check(bootstraps, voucher=voucher)
        assert caught.value.status == 400 and caught.value.field == "bootstrap_host"


def test_keys_of_each_purpose_differ() -> None:
    assert len({derive(SECRET, p) for p in ("a", "b", "vouchers", "http calls")}) == 4
    assert not is_vouched("", SECRET, host="h", port=1, rooms=[1])


def test_secret_files(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match="--cluster-secret-file: cannot read"):
        read_secret_file(str(path))
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="holds 5 bytes, at least 16"):
        read_secret_file(str(path))
    path.write_text("long enough to be one\n")
    assert read_secret_file(str(path)) == b"long enough to be one"


def test_keys_rotate_without_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\nold\n\nshared\n")
    file.chmod(0o644)
    ring = KeyRing(key="flag", file=str(file))
    assert "chmod 600" in caplog.text and ring.first == "flag"
    assert all(ring.holder(f"Bearer {k}") for k in ("flag", "old", "shared")) and not ring.holder("Bearer new")
    replacement = tmp_path / "keys.new"
    replacement.write_text("new\nshared\n")
    os.replace(replacement, file)
    ring.refresh(0.0)
    assert all(ring.holder(f"Bearer {k}") for k in ("flag", "new", "shared")) and not ring.holder("Bearer old")
    file.write_text("two words\n")
    ring.refresh(0.5)
    assert ring.holder("Bearer new")  # too soon to look again
    ring.refresh(1.5)
    assert ring.holder("Bearer new") and "stay valid" in caplog.text
    file.write_text("last\n")
    ring.refresh(1.6, at_once=True)  # SIGHUP
    assert ring.holder("Bearer last") and not ring.holder("Bearer new")


def test_a_new_key_is_known_before_it_is_refused(tmp_path: Path) -> None:
    """A peer may have read the file before we look at it again; who tries keys makes us look no more than so often."""
    file, admin = tmp_path / "keys", tmp_path / "admin"
    for path in (file, admin):
        path.touch(mode=0o600)
    file.write_text("old\n")
    admin.write_text("root\n")
    gate = open_gate(api_key=None, api_key_file=str(file), admin_api_key=None, admin_api_key_file=str(admin))
    assert gate.caller("Bearer new", 10.0).access is Access.NONE
    file.write_text("old\nnew\n")
    admin.write_text("second\n")
    assert gate.caller("Bearer new", 10.01).access is Access.NONE  # too soon
    assert gate.caller("Bearer old", 10.1).access is Access.USER
    assert gate.caller("Bearer new", 10.1).access is Access.USER
    assert gate.caller("Bearer second", 10.1).access is Access.ADMIN


def test_a_router_passes_on_a_key_that_workers_have(tmp_path: Path) -> None:
    """While one is rotated out, workers may have forgotten the first of the file before the router does."""
    file, admin = tmp_path / "keys", tmp_path / "admin"
    for path, text in ((file, "old\nnew\n"), (admin, "root\nsecond\n")):
        path.touch(mode=0o600)
        path.write_text(text)
    rings = {"worker": KeyRing(file=str(file)), "admin": KeyRing(file=str(admin))}
    credentials = Credentials(api=KeyRing(key="client"), **rings)
    assert credentials.for_client("Bearer new") == bearer("new")
    assert credentials.for_client("Bearer client") == credentials.for_client("") == bearer("old")
    assert credentials.for_admin("Bearer second") == bearer("second")
    assert credentials.for_admin("Bearer client") == bearer("root")
    for path, text in ((file, "new\n"), (admin, "second\n")):
        path.write_text(text)
    assert credentials.for_client("Bearer client") == credentials.own() == bearer("new")  # workers may know it already
    assert credentials.for_admin("Bearer client") == credentials.own_admin() == bearer("second")


@pytest.mark.parametrize(
    ("headers", "authorization"),
    [
        ({}, ""),
        ({"x-api-key": ""}, ""),
        ({"x-api-key": "k"}, "Bearer k"),
        ({"Authorization": "Bearer a"}, "Bearer a"),
        ({"Authorization": "Bearer a", "x-api-key": "k"}, "Bearer a"),
        ({"Authorization": "", "x-api-key": "k"}, "Bearer k"),
    ],
)
def test_the_key_of_a_request(headers: dict[str, str], authorization: str) -> None:
    assert authorization_of(headers) == authorization


def test_wrong_key_files_and_headers(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for content in ("", "# nothing\n", "a b\n", "tab\tbed\n"):
        file.write_text(content)
        with pytest.raises(ConfigError, match="--api-key-file"):
            KeyRing(file=str(file))
    with pytest.raises(ConfigError, match="--api-key: must be printable"):
        KeyRing(key="")
    ring = KeyRing(key="k")
    assert ring.holder("bearer k") and ring.holder("Bearer  k ")
    long = f"Bearer {'k' * 10**6}"
    for header in ("", "k", "Basic k", "Bearer", "Bearer ", "Bearer kk", "Bearer K", "Bearer k\udcff", long):
        assert ring.holder(header) is None


# (api key set, admin key set, header) -> access
GATES = [
    ("", "", "", Access.ADMIN),
    ("u", "", "", Access.NONE),
    ("u", "", "u", Access.ADMIN),
    ("u", "a", "u", Access.USER),
    ("u", "a", "a", Access.ADMIN),
    ("u", "a", "x", Access.NONE),
    ("", "a", "", Access.USER),
    ("", "a", "a", Access.ADMIN),
]


@pytest.mark.parametrize(("api", "admin", "sent", "access"), GATES)
def test_gate(api: str, admin: str, sent: str, access: Access) -> None:
    gate = KeyGate(KeyRing(key=api or None), KeyRing(key=admin or None, flag="--admin-api-key"))
    caller = gate.caller(f"Bearer {sent}" if sent else "", 0.0)
    assert caller.access is access
    for need in Access:
        assert (gate.refusal(caller, need) is None) == (access >= need)
    if access is Access.USER:
        refusal = gate.refusal(caller, Access.ADMIN)
        assert refusal is not None and "--admin-api-key" in refusal[1] and refusal[0] == (403 if sent else 401)
    assert open_gate(api_key=None, api_key_file=None, admin_api_key="x", admin_api_key_file=None).is_set is False


def test_signed_calls() -> None:
    server, signer, call = Verifier(SECRET), Signer(SECRET), Call("PUT", "/route?x=1", b"{}")
    assert server.verify(signer.sign(call)[0], call, 0.0)[0] is Verdict.STALE  # it has no challenge yet
    signer.challenge = server.challenge(0.0)
    header, nonce = signer.sign(call)
    for other in (Call("GET", "/route?x=1", b"{}"), Call("PUT", "/route?x=2", b"{}"), Call("PUT", "/route?x=1", b"")):
        assert server.verify(header, other, 1.0) == (Verdict.FORGED, "")
    assert server.verify(header, call, 2 * PERIOD_S - 1)[0] is Verdict.GOOD
    assert server.verify(header, call, 2 * PERIOD_S - 1)[0] is Verdict.FORGED  # a second time
    assert server.verify(signer.sign(call)[0], call, 2 * PERIOD_S)[0] is Verdict.STALE
    assert Verifier(SECRET).verify(signer.sign(call)[0], call, 0.0)[0] is Verdict.STALE  # after a restart
    stranger = Signer(b"some other secret", signer.challenge)
    for junk in ("", "::", "a:b", "a:b:c:d", "é:ü:ö", "x" * 5000, stranger.sign(call)[0]):
        assert server.verify(junk, call, 0.0) == (Verdict.FORGED, "")
    proof = server.sign_answer(nonce, status=200, body=b"yes")
    assert signer.is_answer(proof, nonce, status=200, body=b"yes")
    assert not signer.is_answer(proof, nonce, status=404, body=b"yes")
    assert not signer.is_answer(proof, nonce, status=200, body=b"no")
    assert not signer.is_answer(proof, "another call", status=200, body=b"yes")
    assert not signer.is_answer("é", nonce, status=200, body=b"yes")


def test_nonces_are_forgotten_with_their_challenge() -> None:
    server, signer, call = Verifier(SECRET), Signer(SECRET), Call("GET", "/", b"")
    for period in range(50):
        now_s = period * PERIOD_S
        signer.challenge = server.challenge(now_s)
        for _ in range(20):
            assert server.verify(signer.sign(call)[0], call, now_s)[0] is Verdict.GOOD
    assert len(server._seen) <= 40


@given(
    rate=st.floats(0.1, 100.0), burst=st.integers(1, 50), gaps=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=200)
)
def test_never_more_than_the_rate_and_the_burst(rate: float, burst: int, gaps: list[float]) -> None:
    limiter, now_s, passed = RateLimiter(rate, burst), 0.0, 0
    for gap in gaps:
        now_s += gap
        wait_s = limiter.wait_s("c", now_s)
        passed += wait_s == 0.0
        assert passed <= burst + rate * now_s + 1e-6
        if wait_s:  # and it tells the truth
            assert limiter.wait_s("c", now_s + wait_s + 1e-6) == 0.0
            now_s, passed = now_s + wait_s + 1e-6, passed + 1


def test_clients_do_not_share_a_bucket_and_are_forgotten() -> None:
    limiter = RateLimiter(1.0, 1)
    assert limiter.wait_s("a", 0.0) == 0.0 and limiter.wait_s("b", 0.0) == 0.0 and limiter.wait_s("a", 0.0) > 0
    for i in range(MAX_CLIENTS):
        limiter.wait_s(f"x{i}", 0.0)
    assert limiter.wait_s("x9", 0.0) > 0 and limiter.wait_s("a", 0.0) == 0.0  # "a" is forgotten: a full bucket again
    assert make_limiter(0.0, 5) is None and make_limiter(0.1, 0) == RateLimiter(0.1, 1)
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff") != client_of("2001:db8:1::1")
    assert client_of("10.0.0.1") != client_of("10.0.0.2") and client_of(None) == ""


def test_depth_against_the_decoded_value() -> None:
    rng, deep = random.Random(0), 0
    for _ in range(3000):
        value = _nested(rng, rng.randint(1, 8))
        limit = rng.randint(0, 6)
        assert deeper_than(json.dumps(value).encode(), limit) == (_depth(value) > limit)
        deep += _depth(value) > limit
    assert 300 < deep < 2700
    assert deeper_than(b"[" * 65) and not deeper_than(b'"' + b"[" * 1000 + b'"') and not deeper_than(b"[]" * 1000)


def _nested(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        return rng.choice(['a["', '\\"', "{{", "\\", "", 'x\n"[', 1, None])
    if kind < 0.6:
        return [_nested(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(["k[", '"', "z\\"]): _nested(rng, depth - 1) for _ in range(rng.randint(0, 3))}


def _depth(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    return 1 + max((_depth(v) for v in (value.values() if isinstance(value, dict) else value)), default=0)
