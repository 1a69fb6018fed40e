"""Refuses to start a worker that others than this machine could command without a secret."""

import logging

from disagg.config import DisaggConfig
from engine.config import ServerConfig
from security.addresses import require_secret

log = logging.getLogger(__name__)


def check_exposure(server: ServerConfig, disagg: DisaggConfig, *, control_host: str) -> None:
    """Raises `SecurityConfigError`; with --allow-insecure it warns instead.

    HTTP needs an API key; control plane, transfer engine and bootstrap server, which only a disaggregated worker has,
    need the cluster's secret.
    """
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
    for text in warnings:
        if text is not None:
            log.warning(text)


def _control_addresses(server: ServerConfig, disagg: DisaggConfig, control_host: str) -> list[tuple[str, str]]:
    """(flag, address) of what only members of the cluster may talk to."""
    if disagg.disaggregation_mode == "null":
        return []
    named = disagg.disaggregation_control_host is not None
    found = [("--disaggregation-control-host" if named else "--host", control_host)]
    embedded = disagg.disaggregation_mode == "prefill" and disagg.disaggregation_bootstrap_server is None
    return [*found, ("--host", server.host)] if embedded else found
