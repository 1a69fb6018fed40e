"""Services of a worker's frontends, from its flags."""

from disagg.config import DisaggConfig, read_secret
from engine.config import EngineConfig, ServerConfig
from engine.frontend.bootstraps import BootstrapAllowlist
from engine.frontend.role_switch import RoleSwitch
from engine.frontend.services import FrontendSpec
from service.flags import values_by_name
from service.security.secret import router_secret


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
