"""Plan of a worker's session in one role: its flags, checked; also of the one after a switch."""

from dataclasses import dataclass, replace
from pathlib import Path

from disagg.config import DisaggConfig
from disagg.processes.exposure import check_events_exposure, check_exposure, check_nodes_exposure, make_allowlist
from disagg.processes.rank_start import gpus_of_ranks, on_gpu, visible_here
from engine.config import EngineConfig, ServerConfig
from engine.flags.encoder import check_one_process, vision_of
from engine.flags.pdmux import check_pdmux_role
from engine.flags.rank_rules import check_ranks
from engine.flags.resolve import of_role
from engine.flags.tokenizer import check_tokenizer_flags
from engine.frontend.bootstraps import BootstrapAllowlist
from engine.frontend.client.dp_policy import rule_of
from engine.frontend.role_switch import RoleSwitchState
from engine.lora.peft_config import named_paths
from engine.model_files.model_config import load_model_config
from engine.text.tokenizer import load_tokenizer
from service.flags import ConfigError
from service.http.listening import require_free

BOOTSTRAP_PORT_FLAG = "--disaggregation-bootstrap-port"
ANY_ADDRESS = ("0.0.0.0", "::", "")


@dataclass(frozen=True, kw_only=True)
class SessionPlan:
    """Checked flags; `given`: before the role's. `control_host`: peers' address for this worker."""

    given: EngineConfig
    engine: EngineConfig
    server: ServerConfig
    disagg: DisaggConfig
    control_host: str
    bootstrap_allowlist: BootstrapAllowlist

    @property
    def role(self) -> str:
        return self.disagg.disaggregation_mode

    @property
    def has_bootstrap_server(self) -> bool:
        return self.role == "prefill" and self.disagg.disaggregation_bootstrap_server is None


def plan_session(*, engine: EngineConfig, server: ServerConfig, disagg: DisaggConfig) -> SessionPlan:
    """Raises ConfigError."""
    if server.num_frontends > 1 and server.enable_early_rejection:
        raise ConfigError(
            "--enable-early-rejection: needs --tokenizer-worker-num 1, which sees the queue of all requests"
        )
    rule_of(server.load_balance_method, mode=disagg.disaggregation_mode)
    retracted_kv = disagg.disaggregation_decode_retraction_backup
    check_pdmux_role(engine, disagg.disaggregation_mode, retracted_kv=retracted_kv)
    check_tokenizer_flags(engine)
    gpus_of_ranks(engine, visible_here)
    model = load_model_config(engine.model_path)
    if disagg.disaggregation_mode == "encode":
        check_one_process(engine)
        vision_of(model, engine.model_path)
    check_ranks(engine, model)
    control_host = _control_host(server, disagg) if engine.node_rank == 0 else ""  # others': disagg/processes/node.py
    if engine.node_rank == 0:
        check_exposure(server, disagg, control_host=control_host)
        check_events_exposure(server, engine, disagg)
    check_nodes_exposure(server, engine, disagg)
    bootstrap_allowlist = make_allowlist(server, disagg, control_host=control_host)
    return SessionPlan(
        given=engine,
        engine=of_role(engine, disagg.disaggregation_mode, device="cuda" if on_gpu(engine) else "cpu"),
        server=server,
        disagg=disagg,
        control_host=control_host,
        bootstrap_allowlist=bootstrap_allowlist,
    )


def next_session(plan: SessionPlan, to: RoleSwitchState) -> SessionPlan:
    """Plan the next session with current weights and adapters. Raises ConfigError."""
    if plan.given.nnodes > 1:
        raise ConfigError(
            f"--nnodes {plan.given.nnodes}: a worker on several machines keeps its role; start another one"
        )
    if to.model_path != plan.given.model_path and not plan.given.skip_tokenizer_init:
        load_tokenizer(to.model_path)  # loading new weights did not check it
    engine = replace(
        plan.given,
        model_path=to.model_path,
        served_model_name=to.served_name,
        weight_version=to.weight_version,
        enable_lora=plan.given.enable_lora or bool(plan.given.lora_paths),
        lora_paths=tuple(f"{name}={path}" for name, path in to.adapters.items()),
    )
    _check_adapters(engine, to)
    disagg = replace(plan.disagg, disaggregation_mode=to.role)
    return plan_session(engine=engine, server=plan.server, disagg=disagg)


def _check_adapters(engine: EngineConfig, to: RoleSwitchState) -> None:
    """Raises ConfigError for an adapter that no flag can load."""
    if named_paths(engine.lora_paths) != to.adapters:
        raise ConfigError("an adapter's name has a '=' in it, so it cannot be loaded again; unload it")
    for name, path in to.adapters.items():
        if not Path(path).is_dir():
            raise ConfigError(
                f"the adapter {name!r} cannot be loaded again: {path} is no directory any more; unload it"
            )


def check_next_session(plan: SessionPlan, to: RoleSwitchState) -> None:
    """Raises ConfigError as `next_session`, or if its bootstrap port is taken."""
    following = next_session(plan, to)
    if following.has_bootstrap_server and not plan.has_bootstrap_server:
        require_free(following.server.host, following.disagg.disaggregation_bootstrap_port, flag=BOOTSTRAP_PORT_FLAG)


def _control_host(server: ServerConfig, disagg: DisaggConfig) -> str:
    host = disagg.disaggregation_control_host or server.host
    if disagg.has_peers and host in ANY_ADDRESS:
        raise ConfigError(
            f"--host {server.host}: peers need one address of this worker; name it with --disaggregation-control-host"
        )
    return host
