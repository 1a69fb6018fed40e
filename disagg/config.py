"""Flags of disaggregated serving, by SGLang's names, and messages to child processes."""

from dataclasses import dataclass

import msgspec

from engine.config import MAX_PORT, EngineConfig, ServerConfig
from engine.frontend.bootstraps import BootstrapAllowlist
from engine.frontend.role_switch import RoleSwitch
from engine.frontend.spec import FrontendSpec
from engine.parallel.region_plan import RegionPlan
from service.flags import FlagSet, flag, values_by_name
from service.security.keys import read_secret_file, router_secret


@dataclass(frozen=True, kw_only=True)
class DisaggConfig(FlagSet):
    """Role of this worker and KV hand-over."""

    topic = "disaggregation"

    disaggregation_mode: str = flag(
        "null",
        "role of this worker; null: it serves whole requests; encode: it computes features of images for other workers",
        choices=("null", "prefill", "decode", "encode"),
    )
    disaggregation_transfer_backend: str = flag(
        "nixl", "engine that moves the KV cache", choices=("nixl", "mooncake", "fake")
    )
    disaggregation_mooncake_protocol: str = flag(
        "auto",
        "transport of the mooncake backend; auto: what an MC_FORCE_* or MC_INTRANODE_NVLINK variable says, else rdma with an RDMA "
        "device, else tcp; nvlink_intra: between the GPUs of one machine; nvlink: across an NVLink fabric (NVL72)",
        choices=("auto", "tcp", "rdma", "nvlink_intra", "nvlink"),  # SGLang's names
    )
    disaggregation_ib_device: str | None = flag(
        None, "RDMA devices that carry the KV, like mlx5_0,mlx5_1; default: those that the transfer engine chooses"
    )
    disaggregation_bootstrap_port: int = flag(
        8998, "port of the bootstrap server in a prefill worker", least=0, most=MAX_PORT, special={0: "a free one"}
    )
    disaggregation_bootstrap_server: str | None = flag(
        None, "HOST:PORT of a separate bootstrap server (`tandem bootstrap`); default: one inside the prefill worker"
    )
    disaggregation_control_host: str | None = flag(
        None, "address that the control plane binds and that peers dial; default: --host"
    )
    disaggregation_bootstrap_allowed: tuple[str, ...] = flag(
        (),
        "bootstrap servers that a request may name to a decode worker, and workers whose KV it may name: HOST, HOST:PORT or a network "
        "like 10.0.0.0/8; "
        "default: this machine's if the worker listens on loopback, and any that a router with the cluster's "
        "secret vouches for",
    )
    num_reserved_decode_tokens: int = flag(
        64,
        "tokens by which each request of a decode worker must be able to grow before the worker admits another one; "
        "requests are expected to grow as recent answers did",
        least=0,
    )
    disaggregation_decode_retraction_backup: str = flag(
        "recompute",
        "what happens to the KV of a request that decode retracts; recompute: decode computes it again; host: it waits in "
        "host memory; prefill: a prefill worker computes it again",
        choices=("recompute", "host", "prefill"),
    )
    disaggregation_kv_checksum: bool = flag(
        True, "compare a checksum of a prompt's KV pages before decode starts (alike on prefill and decode workers)"
    )
    prefix_fetch: bool = flag(
        False,
        "a prefill or decode worker fetches a prefix that another one has cached, answers among them, if that is faster than to "
        "compute it (needed on all of them)",
    )
    feature_fetch: bool = flag(
        False,
        "a prefill worker, or one that serves whole requests, gets features of images from the encode workers that "
        "the router names; it encodes an image itself where none is named, or the features do not come",
    )
    disaggregation_layerwise_transfer: str = flag(
        "auto",
        "send each layer's KV while later layers compute; auto: if pages are large enough",
        choices=("auto", "on", "off"),
    )
    cluster_secret_file: str | None = flag(
        None, "file with the secret of the cluster; it authenticates control plane and bootstrap server"
    )

    @property
    def has_peers(self) -> bool:
        return self.disaggregation_mode != "null" or self.feature_fetch


class JointSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors shared by DP ranks with DP attention.

    Memory, one that wakes each loop, and where ranks on GPUs meet.
    """

    memory: int
    wakes: tuple[int, ...]
    store: int


class SchedulerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Message to a DP rank's scheduler process; prefill registers at `bootstrap`.

    `gpus` are its ranks'; () leaves all visible ones.
    """

    engine: EngineConfig
    disagg: DisaggConfig
    ipc_dir: str
    control_host: str
    bootstrap: str | None
    log_level: str = "info"
    log_format: str = "text"
    progress: bool = False
    num_frontends: int = 1
    dp_rank: int = 0
    joint: JointSpec | None = None
    gpus: tuple[str, ...] = ()

    @property
    def process(self) -> str:
        rank = f" dp{self.dp_rank}" if self.engine.dp_size > 1 else ""
        return f"{role_name(self.disagg)} scheduler{rank}"

    def trace_name(self, rank: int) -> str:
        """Name of a rank in traces; DP ranks as in SGLang: DP-1."""
        dp = f"-DP-{self.dp_rank}" if self.engine.dp_size > 1 else ""
        return f"{role_name(self.disagg)}{dp}" + (f"-rank{rank}" if self.engine.num_ranks > 1 else "")


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Message from a leader to a follower, with descriptors that it inherits.

    - descriptors: shared memory, channel to the leader, with peers its transfer engine's socket
    - wires: connections to other machines' ranks (engine/flags/nodes.py)
    - store: rendezvous file of GPU ranks
    """

    scheduler: SchedulerSpec
    rank: int
    region: RegionPlan
    descriptors: tuple[int, ...]
    wires: dict[str, int] = {}
    store: int | None = None

    @property
    def name(self) -> str:
        """ "rank 3 of 4", with DP attention over all DP ranks."""
        scheduler, config = self.scheduler, self.scheduler.engine
        if not config.enable_dp_attention:
            return f"rank {self.rank} of {config.num_ranks}"
        return f"rank {scheduler.dp_rank * config.num_ranks + self.rank} of {config.tp_size}"


class OtherFrontendSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Message to another frontend process, in a file, since it may hold keys."""

    engine: EngineConfig
    server: ServerConfig
    disagg: DisaggConfig
    ipc_dir: str
    control_host: str


def role_name(config: DisaggConfig) -> str:
    """ "prefill", "decode", "encode" or "unified"."""
    return config.disaggregation_mode.replace("null", "unified")


def read_secret(path: str | None) -> bytes | None:
    """Raises ConfigError."""
    return None if path is None else read_secret_file(path)


# ---- Services of a worker's frontends, from its flags.


def frontend_spec(
    engine: EngineConfig,
    server: ServerConfig,
    disagg: DisaggConfig,
    allowlist: BootstrapAllowlist,
    *,
    switch: RoleSwitch | None = None,
) -> FrontendSpec:
    return FrontendSpec(
        server=server,
        engine=engine,
        mode=disagg.disaggregation_mode,
        extra_info=values_by_name(disagg),
        default_bootstrap_port=disagg.disaggregation_bootstrap_port,
        bootstrap_allowlist=allowlist,
        warms_up=not server.skip_server_warmup,
        switch=switch,
        secret=router_secret(read_secret(disagg.cluster_secret_file)),
    )
