"""Flags of disaggregated serving, named as SGLang names them."""

from dataclasses import dataclass

from engine.config import flag


@dataclass(frozen=True, kw_only=True)
class DisaggConfig:
    """Role of this worker and how KV is handed over."""

    disaggregation_mode: str = flag("null", "role of this worker", choices=("null", "prefill", "decode"))
    disaggregation_transfer_backend: str = flag(
        "nixl", "engine that moves the KV cache", choices=("nixl", "mooncake", "fake")
    )
    disaggregation_bootstrap_port: int = flag(8998, "port of the bootstrap server (prefill); 0: a free one")
    disaggregation_bootstrap_server: str | None = flag(
        None, "HOST:PORT of a bootstrap server on its own (`tandem bootstrap`); default: one inside the prefill worker"
    )
    disaggregation_control_host: str | None = flag(
        None, "address the control plane binds and tells its peers; default: --host"
    )
    disaggregation_bootstrap_allowed: tuple[str, ...] = flag(
        (),
        "bootstrap servers that a decode worker may ask because a request names them: HOST, HOST:PORT or a network like "
        "10.0.0.0/8; default: this machine's if it listens on loopback, and those that a router with the cluster's secret "
        "vouches for",
    )
    disaggregation_bootstrap_timeout: float = flag(300.0, "seconds prefill waits for decode's page indices")
    disaggregation_prealloc_timeout: float = flag(300.0, "seconds decode waits for memory for a request")
    num_reserved_decode_tokens: int = flag(
        64,
        "decode takes a new request only if all it has can grow: by what ended answers teach, and each by this at least",
    )
    disaggregation_decode_retraction_backup: str = flag(
        "recompute",
        "KV of a request that decode retracts: recompute: computed again by decode itself; host: kept in host memory "
        "meanwhile; prefill: computed again by a prefill worker",
        choices=("recompute", "host", "prefill"),
    )
    disaggregation_waiting_timeout: float = flag(
        300.0, "seconds decode waits for the first KV after it sent its indices"
    )
    disaggregation_transfer_timeout: float = flag(120.0, "seconds without progress before a running transfer fails")
    disaggregation_handshake_timeout: float = flag(
        10.0, "seconds for the bootstrap look-up and the handshake with a peer"
    )
    disaggregation_bootstrap_grace: float = flag(
        5.0, "seconds a bootstrap server that refuses connections is asked again (decode): it may be starting anew"
    )
    disaggregation_heartbeat_interval: float = flag(1.0, "seconds between heartbeats of connected peers")
    disaggregation_heartbeat_max_failures: int = flag(3, "missed heartbeats before a peer is declared dead")
    disaggregation_drain_timeout: float = flag(
        30.0, "seconds to wait for a peer's abort acknowledgement before its session is fenced"
    )
    disaggregation_kv_checksum: bool = flag(
        False, "prefill sends a checksum of a prompt's KV pages, decode compares before it starts (both need the flag)"
    )
    disaggregation_layerwise_transfer: str = flag(
        "auto",
        "prefill sends a layer's KV while the next layers compute; on, off, or auto: where pages are large enough",
        choices=("auto", "on", "off"),
    )
    cluster_secret_file: str | None = flag(
        None, "file with a secret that all workers share; it authenticates control plane and bootstrap server"
    )
    fake_transfer_delay_ms: float = flag(0.0, "fake backend: time a transfer takes")
    fake_transfer_failure_rate: float = flag(0.0, "fake backend: share of transfers that fail")


def role_name(config: DisaggConfig) -> str:
    """ "prefill" | "decode" | "unified", as people, logs and metrics call it."""
    return config.disaggregation_mode.replace("null", "unified")
