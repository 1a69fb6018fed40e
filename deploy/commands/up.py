"""`tandem up`: a whole cluster on this machine."""

import argparse
import asyncio
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.flags import Parser, add_flags, config_from, given_argv
from deploy.foreign.worker import WORKER
from deploy.launcher import display as summary
from deploy.launcher.display import make_display
from deploy.launcher.fork_servers import engine_server, http_fork_server
from deploy.launcher.mps import mps_for
from deploy.launcher.plan import ProcessSpec, chosen_gpus, num_ports, plan_cluster, shared_gpus, with_env
from deploy.launcher.probe import free_ports, get_json
from deploy.launcher.process import Child
from deploy.launcher.roles import ClusterConfig, RoleFlags, check_role, num_ranks, units_between, values_by_role
from deploy.launcher.supervisor import Supervisor
from disagg.config import DisaggConfig
from engine.config import MEM_FRACTION_OF, EngineConfig, ServerConfig
from engine.device.gpus import VISIBLE, installed_gpus, visible_gpus
from engine.model_files.model_config import DEFAULT_MODEL_PATH, ModelConfig, load_model_config
from engine.threads import usable_cores
from router.config import RouterConfig
from service.flags import ConfigError
from service.http.listening import require_free, url_of
from service.process.files import write_ready_file
from service.security.keys import KeyRing
from service.security.secret import ROUTER_SECRET
from transfer_backends.engines.wheels import installed_torch, torch_cuda_major

# ---- Flags of `tandem up`: its own, and those for workers and router.

# Set by the cluster.
_SERVER_SKIP = ("host", "port", "ready_file")
_DISAGG_SKIP = (
    "disaggregation_mode",
    "disaggregation_transfer_backend",
    "disaggregation_bootstrap_port",
    "disaggregation_bootstrap_server",
    "disaggregation_control_host",
)
_ROUTER_SKIP = ("host", "port", "ready_file", "pd_disaggregation", "mixed")
_WORKER_KEYS = (
    "api_key",
    "api_key_file",
    "admin_api_key",
    "admin_api_key_file",
)  # sent to workers by the router
# Shared by workers and router.
_SHARED = (
    *_WORKER_KEYS,
    "allow_insecure",
    "allowed_hosts",
    "allowed_media_domains",
    "allowed_media_networks",
    "allowed_origins",
    "cluster_secret_file",
    "disable_image_fetch",
    "drain_timeout_s",
    "enable_trace",
    "log_format",
    "log_level",
    "max_body_bytes",
    "max_images_per_request",
    "max_stored_responses",
    "otlp_traces_endpoint",
    "prefix_fetch",
    "sse_keep_alive_interval_s",
)


def build_parser() -> Parser:
    parser = Parser(
        prog="tandem up",
        foreign=WORKER,
        description="Start a cluster on this machine: a router, prefill and decode workers. Ctrl-C ends all of it, SIGTERM drains it first.",
    )
    add_flags(parser, ClusterConfig, title="cluster")
    add_flags(parser, EngineConfig, title="every worker's model, memory and scheduling", only_given=True)
    add_flags(parser, ServerConfig, title="every worker's HTTP side", skip=_SERVER_SKIP, only_given=True)
    add_flags(parser, DisaggConfig, title="hand-over of KV", skip=_DISAGG_SKIP, only_given=True)
    add_flags(parser, RouterConfig, title="router", skip=(*_ROUTER_SKIP, *_SHARED), only_given=True)
    return parser


def flags_by_role(config: ClusterConfig, args: argparse.Namespace) -> dict[str, RoleFlags]:
    """Return workers' flags, checked against the model. Raises ConfigError."""
    by_role = values_by_role(config, vars(args))
    if config.encode and _model_of(args).vision is None:
        raise ConfigError(f"--encode {config.encode}: the model sees no images; leave it out, or give --model-path")
    if any(num_ranks(values) > 1 for values in by_role.values()):
        model = _model_of(args)
        with_kv = {role: values for role, values in by_role.items() if role != "encode"}
        for role, values in with_kv.items():
            check_role(config, role, values, model)
        if (units := units_between(model, with_kv)) is not None:
            by_role |= {role: {**values, "kv_units": units} for role, values in with_kv.items()}
    return {role: RoleFlags(args=_worker_args(values), ranks=num_ranks(values)) for role, values in by_role.items()}


def _model_of(args: argparse.Namespace) -> ModelConfig:
    return load_model_config(getattr(args, "model_path", "") or DEFAULT_MODEL_PATH)


def _worker_args(values: Mapping[str, Any]) -> list[str]:
    args = argparse.Namespace(**values)
    return [
        *given_argv(args, EngineConfig),
        *given_argv(args, ServerConfig, skip=_SERVER_SKIP),
        *given_argv(args, DisaggConfig, skip=_DISAGG_SKIP),
    ]


def router_args(args: argparse.Namespace) -> list[str]:
    given = vars(args)
    found = given_argv(args, RouterConfig, skip=_ROUTER_SKIP)
    for name in _WORKER_KEYS:
        if name in given and f"worker_{name}" not in given:
            found.append(f"--worker-{name.replace('_', '-')}={given[name]}")
    return found


# ---- up

INFO_TIMEOUT_S = 5.0

_MODEL_FLAGS = ("model_path", "revision", "served_model_name")


def run(argv: Sequence[str]) -> int:
    """Run until Ctrl-C; return the exit status."""
    args = build_parser().parse_strict(argv)
    config = config_from(args, ClusterConfig)
    if config.port:
        require_free(config.host, config.port, flag="--port")
    set_local_model(args)
    clear_ready_file(config.ready_file)
    log_dir = make_log_dir(config.run_dir)
    gpus = gpus_for(config, args, torch=installed_torch())
    specs, front = plan(config, args, gpus=gpus)
    shared = shared_gpus(specs)
    with (
        mps_for(shared, run_dir=log_dir) as (env, notes),
        engine_server(
            specs, model=_model_path(args), threads=getattr(args, "num_threads", None), log_dir=log_dir
        ) as server,
        http_fork_server(count=len(specs), log_dir=log_dir) as http_server,
    ):
        specs = with_env(specs, [name for names in shared.values() for name in names], env)
        specs = with_env(specs, [spec.name for spec in specs if spec.ranks], server)
        specs = with_env(specs, [spec.name for spec in specs], {**http_server, **own_secret(config, args)})
        return asyncio.run(_supervise(config, vars(args), specs=specs, front=front, log_dir=log_dir, notes=notes))


def own_secret(config: ClusterConfig, args: argparse.Namespace) -> dict[str, str]:
    """Return the router's secret as environment, unless in a file or without router."""
    if config.unified or getattr(args, "cluster_secret_file", None) is not None or os.environ.get(ROUTER_SECRET):
        return {}
    return {ROUTER_SECRET: secrets.token_hex(32)}


def gpus_for(config: ClusterConfig, args: argparse.Namespace, *, torch: str | None) -> list[str]:
    """Return the engines' GPUs, none on CPUs. Raises ConfigError."""
    device = getattr(args, "device", EngineConfig.device)
    if device == "cpu" or (device == "auto" and torch_cuda_major(torch) is None):
        if config.gpu_ids:
            raise ConfigError("--gpu-ids: the engines run on CPUs (--device, or a torch without CUDA); leave it out")
        return []
    return chosen_gpus(visible_gpus(os.environ.get(VISIBLE), installed_gpus), config.gpu_ids)


def plan(config: ClusterConfig, args: argparse.Namespace, *, gpus: Sequence[str] = ()) -> tuple[list[ProcessSpec], str]:
    front, *free = [config.port, *free_ports(num_ports(config))] if config.port else free_ports(num_ports(config) + 1)
    specs = plan_cluster(
        config,
        front=front,
        free=free,
        cores=usable_cores(),
        gpus=gpus,
        mem_fraction=getattr(args, "mem_fraction_static", MEM_FRACTION_OF["cuda"]),
        flags=flags_by_role(config, args),
        router_args=router_args(args),
    )
    return specs, url_of(config.host, front)


def set_local_model(args: argparse.Namespace) -> None:
    """Set local model files, downloading once. Raises ConfigError."""
    given = {name: value for name, value in vars(args).items() if name in _MODEL_FLAGS}
    if not given:
        return  # the shipped model
    from engine.flags.model_source import with_local_model
    from engine.model_files.model_config import load_model_config

    formats = {"load_format": args.load_format} if hasattr(args, "load_format") else {}
    local = with_local_model(EngineConfig(**given, **formats))
    load_model_config(local.model_path)
    for name in given:
        delattr(args, name)
    if given.get("model_path"):
        args.model_path = local.model_path
    if local.served_model_name is not None:
        args.served_model_name = local.served_model_name


def _model_path(args: argparse.Namespace) -> str:
    return getattr(args, "model_path", "") or DEFAULT_MODEL_PATH


def clear_ready_file(name: str | None) -> None:
    """Remove an earlier ready file. Raises ConfigError."""
    if name:
        path = Path(name)
        if not path.parent.is_dir():
            raise ConfigError(f"--ready-file: {path.parent} is no directory; create it first")
        path.unlink(missing_ok=True)


def make_log_dir(run_dir: str | None) -> Path:
    if run_dir is None:
        return Path(tempfile.mkdtemp(prefix="tandem-"))
    path = Path(run_dir)
    path.mkdir(parents=True, exist_ok=True)
    return path


async def _supervise(
    config: ClusterConfig,
    given: Mapping[str, Any],
    *,
    specs: Sequence[ProcessSpec],
    front: str,
    log_dir: Path,
    notes: Sequence[str],
) -> int:
    """Run `specs`. `given`: typed flags by field."""
    display = make_display()
    display.message(f"tandem up: {', '.join(spec.name for spec in specs)} (logs: {log_dir})")
    for note in notes:
        display.message(f"tandem up: {note}")
    supervisor = Supervisor(
        specs,
        log_dir=log_dir,
        display=display,
        start_timeout_s=config.start_timeout_s,
        drain_timeout_s=given.get("drain_timeout_s", ServerConfig.drain_timeout_s),
    )

    async def on_ready(children: Sequence[Child]) -> None:
        api_key = KeyRing(key=given.get("api_key"), file=given.get("api_key_file")).first
        members = [await asyncio.to_thread(_member, child, api_key) for child in children]
        names = [given.get("served_model_name"), *(m.info.get("served_model_name") for m in members), "default"]
        text = summary.summary_text(
            members,
            front=front,
            backend=None if config.unified else config.transfer_backend,
            log_dir=log_dir,
            model=next(name for name in names if name),
            shipped=not given.get("model_path"),
            auth=api_key is not None,
        )
        print(text, flush=True)
        write_ready_file(config.ready_file, summary.ready_info(members, front=front))

    return await supervisor.run(on_ready)


def _member(child: Child, api_key: str | None) -> summary.Member:
    spec = child.spec
    is_worker = spec.role != "router"
    info = get_json(f"{spec.url}/get_server_info", timeout_s=INFO_TIMEOUT_S, api_key=api_key) if is_worker else {}
    return summary.Member(name=spec.name, role=spec.role, url=spec.url, pid=child.pid, info=info)
