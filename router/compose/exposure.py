"""Access by a router's flags: keys, secret, browsers, limits of requests, named workers."""

import logging
import time

from router.client.credentials import Credentials
from router.config import ROUTES, RouterConfig
from router.pool.shared_load import SharedLoad
from router.pool.worker import PAIR, UNIFIED, Role, Way
from router.pool.workers import WorkerTable, WorkerTableError
from service.flags import ConfigError
from service.http.errors import RequestLimits
from service.security.browser import BrowserRule, require_secret
from service.security.keys import KeyGate, KeyRing, open_gate, read_secret_file

HEADER_TIMEOUT_S = 10.0  # for a client to send the head of a request: anyone may connect
BODY_TIMEOUT_S = 60.0  # for the body: 64 MiB at 9 Mbit/s

log = logging.getLogger(__name__)


def limits_of(config: RouterConfig) -> RequestLimits:
    return RequestLimits(
        max_body_bytes=config.max_body_bytes,
        header_timeout_s=HEADER_TIMEOUT_S,
        body_timeout_s=BODY_TIMEOUT_S,
        size_flag="--max-body-bytes",
    )


def make_credentials(config: RouterConfig, gate: KeyGate) -> Credentials:
    return Credentials(
        api=gate.api,
        worker=KeyRing(key=config.worker_api_key, file=config.worker_api_key_file, flag="--worker-api-key"),
        admin=KeyRing(
            key=config.worker_admin_api_key, file=config.worker_admin_api_key_file, flag="--worker-admin-api-key"
        ),
    )


def check_exposure(config: RouterConfig) -> tuple[bytes | None, KeyGate]:
    """The cluster secret and the key gate. ConfigError for a public router without keys."""
    gate = open_gate(
        api_key=config.api_key,
        api_key_file=config.api_key_file,
        admin_api_key=config.admin_api_key,
        admin_api_key_file=config.admin_api_key_file,
    )
    browser_rule(config, gate)  # reports bad flags before any process starts
    warning = require_secret(
        config.host,
        flag="--host",
        what="the router",
        remedy="--api-key-file (or --api-key)",
        has_secret=gate.is_set,
        allow_insecure=config.allow_insecure,
    )
    if warning is not None:
        log.warning(warning)
    return None if config.cluster_secret_file is None else read_secret_file(config.cluster_secret_file), gate


def check_secret(config: RouterConfig, secret: bytes | None) -> None:
    """Raise ConfigError for flags that need a secret, by which workers know their router."""
    for flag, is_given in (("--encode", config.encode), ("--resume-window", config.resume_window_s)):
        if is_given and secret is None:
            raise ConfigError(
                f"{flag}: needs --cluster-secret-file, by which workers know their router; give both the file"
            )


def browser_rule(config: RouterConfig, gate: KeyGate) -> BrowserRule:
    return BrowserRule(
        host=config.host,
        has_keys=gate.is_set,
        allowed_hosts=config.allowed_hosts,
        allowed_origins=config.allowed_origins,
    )


def named_workers(config: RouterConfig, peers: SharedLoad | None) -> WorkerTable:
    table = WorkerTable(config, peers, breaker=config)
    table.pairs = config.route in ("auto", "pair")
    table.whole_at = frozenset(map(Role, ROUTES[config.route]))
    named = [(url, Role.PREFILL, port) for url, port in config.prefill]
    named += [(url, Role.DECODE, None) for url in config.decode]
    named += [(url, Role.UNIFIED, None) for url in config.worker_urls]
    named += [(url, Role.ENCODE, None) for url in config.encode]
    try:
        for url, role, port in named:
            table.add(url, role=role, bootstrap_port=port, now_s=time.monotonic())
    except WorkerTableError as err:
        raise ConfigError(f"--prefill/--decode/--worker-urls/--encode: {err}; name each worker once") from None
    return table


def ways_of(config: RouterConfig) -> tuple[Way, ...]:
    if config.pd_disaggregation:
        return (PAIR, UNIFIED) if config.mixed else (PAIR,)
    return (UNIFIED,)
