"""Checks of a worker's open addresses, and of those that it may dial."""

import logging

from disagg.config import DisaggConfig, read_secret
from engine.config import CacheFlags, ParallelFlags, ServerConfig
from engine.flags.kv_events_config import FLAG, parse_kv_events_config
from engine.flags.nodes import address_of
from engine.frontend.bootstraps import BootstrapAllowlist
from service.flags import ConfigError
from service.security.browser import AllowedAddresses, is_loopback, require_secret
from service.security.keys import router_secret

log = logging.getLogger(__name__)


def check_exposure(server: ServerConfig, disagg: DisaggConfig, *, control_host: str) -> None:
    """Refuse (`ConfigError`) or warn of (--allow-insecure) open addresses without key or secret."""
    warnings = [
        require_secret(
            server.host,
            flag="--host",
            what="the worker's HTTP server",
            remedy="--api-key-file (or --api-key)",
            has_secret=bool(server.api_key or server.api_key_file),
            allow_insecure=server.allow_insecure,
        )
    ]
    for flag, host in _control_addresses(server, disagg, control_host):
        warnings.append(
            require_secret(
                host,
                flag=flag,
                what="the control plane",
                remedy="--cluster-secret-file",
                has_secret=disagg.cluster_secret_file is not None,
                allow_insecure=server.allow_insecure,
            )
        )
    for text in (*warnings, _engine_warning(disagg)):
        if text is not None:
            log.warning(text)


def check_events_exposure(server: ServerConfig, engine: CacheFlags, disagg: DisaggConfig) -> None:
    """Raises `ConfigError` if other machines could read events, since they hold prompts."""
    events = parse_kv_events_config(engine.kv_events_config)
    open_hosts = [] if events is None else [host for host in events.hosts() if not is_loopback(host)]
    if not open_hosts or disagg.cluster_secret_file is not None:
        return
    what = f"{FLAG} {open_hosts[0]}: KV events show all users' prompts to every client that connects"
    if not server.allow_insecure:
        raise ConfigError(f"{what}; give --cluster-secret-file, or say --allow-insecure")
    log.warning("INSECURE: %s (--allow-insecure)", what)


def check_nodes_exposure(server: ServerConfig, engine: ParallelFlags, disagg: DisaggConfig) -> None:
    """Raises `ConfigError`, or warns (--allow-insecure), if a stranger could join as a rank."""
    if engine.nnodes == 1:
        return
    warning = require_secret(
        address_of(engine)[0],
        flag="--dist-init-addr",
        what="the group of ranks",
        remedy="--cluster-secret-file",
        has_secret=disagg.cluster_secret_file is not None,
        allow_insecure=server.allow_insecure,
    )
    for text in (warning, _engine_warning(disagg) if engine.node_rank else None):  # node 0's: check_exposure
        if text is not None:
            log.warning(text)


def _control_addresses(server: ServerConfig, disagg: DisaggConfig, control_host: str) -> list[tuple[str, str]]:
    if disagg.disaggregation_mode == "null":
        return []
    named = disagg.disaggregation_control_host is not None
    found = [("--disaggregation-control-host" if named else "--host", control_host)]
    embedded = disagg.disaggregation_mode == "prefill" and disagg.disaggregation_bootstrap_server is None
    return [*found, ("--host", server.host)] if embedded else found


def _engine_warning(disagg: DisaggConfig) -> str | None:
    """Mooncake always binds 0.0.0.0 and ::."""
    if not disagg.has_peers or disagg.disaggregation_transfer_backend != "mooncake":
        return None
    return (
        "the transfer engine mooncake listens on every address of this machine, not on --host alone, without "
        "authentication: keep its ports behind a firewall, or use --disaggregation-transfer-backend nixl"
    )


def make_allowlist(server: ServerConfig, disagg: DisaggConfig, *, control_host: str) -> BootstrapAllowlist:
    """Raises `ConfigError`.

    Local ones are excluded if other machines can send requests: a client could point us at a local
    service.
    """
    secret = read_secret(disagg.cluster_secret_file)
    fetches = {"--prefix-fetch": disagg.prefix_fetch, "--feature-fetch": disagg.feature_fetch}
    for flag, is_given in fetches.items():
        if is_given and router_secret(secret) is None:
            raise ConfigError(
                f"{flag}: needs --cluster-secret-file: only a router that is known by it may name other workers"
            )
    decodes = disagg.disaggregation_mode == "decode"
    if not decodes and not disagg.prefix_fetch and not disagg.feature_fetch:
        return BootstrapAllowlist()
    named = disagg.disaggregation_bootstrap_server
    allowed = AllowedAddresses(
        (*disagg.disaggregation_bootstrap_allowed, *([] if named is None else [named])),
        loopback=is_loopback(server.host) and is_loopback(control_host),
        flag="--disaggregation-bootstrap-allowed",
    )
    return BootstrapAllowlist(allowed, secret=secret, dials_servers=decodes)
