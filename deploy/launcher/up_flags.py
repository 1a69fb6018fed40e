"""Flags of `tandem up`: its own, and what it passes to workers and router."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from deploy.flags import ENGINE_TOPICS, Parser, add_flags, given_argv
from deploy.foreign.worker import WORKER
from deploy.launcher.plan import chosen_gpus
from deploy.launcher.roles import ClusterConfig, RoleFlags, check_role, num_ranks, units_between, values_by_role
from disagg.config import DisaggConfig
from engine.config import EngineConfig, ServerConfig
from engine.device.gpus import VISIBLE, installed_gpus, visible_gpus
from engine.model_files.model_config import DEFAULT_MODEL_PATH, ModelConfig, load_model_config
from router.config import RouterConfig
from service.extras import require
from service.flags import ConfigError
from transfer_backends.engines.wheels import extras_of, torch_cuda_major

# Set by the cluster.
_SERVER_SKIP = ("host", "port", "ready_file")
_DISAGG_SKIP = (
    *("disaggregation_mode", "disaggregation_transfer_backend", "disaggregation_control_host"),
    *("disaggregation_bootstrap_port", "disaggregation_bootstrap_server"),
)
_ROUTER_SKIP = ("host", "port", "ready_file", "pd_disaggregation")
_WORKER_KEYS = ("api_key", "api_key_file", "admin_api_key", "admin_api_key_file")  # sent to workers by the router
# Shared by workers and router.
_SHARED = (
    *(*_WORKER_KEYS, "allow_insecure", "allowed_hosts", "allowed_origins", "cluster_secret_file", "middleware"),
    *("allowed_media_domains", "allowed_media_networks", "disable_image_fetch", "max_images_per_request"),
    *("log_format", "log_level", "enable_trace", "otlp_traces_endpoint"),
    *("drain_timeout_s", "max_body_bytes", "max_stored_responses", "sse_keep_alive_interval_s"),
)
_MODEL_FLAGS = ("model_path", "revision", "served_model_name")


# Groups of help in their order, and what `--help` shows. Those of the router follow.
TOPICS = ("model", "cluster", "server", "keys", *ENGINE_TOPICS)
COMMON = (
    *("model_path", "served_model_name", "dtype", "quantization"),
    *("prefill", "decode", "unified", "transfer_backend", "host", "port", "restart"),
    *("tp_size", "context_length", "max_total_tokens", "mem_fraction_static", "max_running_requests"),
    *("lora_paths", "tool_call_parser", "reasoning_parser", "api_key"),
)


def build_parser() -> Parser:
    parser = Parser(
        prog="tandem up",
        foreign=WORKER,
        topics=TOPICS,
        common=COMMON,
        model=("model_path", "the model, as --model-path"),
        description="Start a cluster on this machine: a router, prefill and decode workers. Ctrl-C ends all of it, SIGTERM drains it first.",
    )
    add_flags(parser, ClusterConfig, title="cluster")
    add_flags(parser, EngineConfig, title="model", only_given=True)
    add_flags(parser, ServerConfig, title="server", skip=_SERVER_SKIP, only_given=True)
    add_flags(parser, DisaggConfig, title="disaggregation", skip=_DISAGG_SKIP, only_given=True)
    add_flags(parser, RouterConfig, title="router", skip=(*_ROUTER_SKIP, *_SHARED), only_given=True)
    return parser


def require_extras(config: ClusterConfig) -> None:
    """Raises ConfigError."""
    require("engine", *(() if config.unified else extras_of(config.transfer_backend)))


def flags_by_role(config: ClusterConfig, args: argparse.Namespace) -> dict[str, RoleFlags]:
    """Checked against the model. Raises ConfigError."""
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
    return load_model_config(model_path_of(args))


def model_path_of(args: argparse.Namespace) -> str:
    return getattr(args, "model_path", "") or DEFAULT_MODEL_PATH


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


def set_local_model(args: argparse.Namespace) -> None:
    """Set local files, downloading once. Raises ConfigError."""
    given = {name: value for name, value in vars(args).items() if name in _MODEL_FLAGS}
    if not given:
        return  # the shipped model
    from engine.flags.model_source import with_local_model

    formats = {"load_format": args.load_format} if hasattr(args, "load_format") else {}
    local = with_local_model(EngineConfig(**given, **formats))
    load_model_config(local.model_path)
    for name in given:
        delattr(args, name)
    if given.get("model_path"):
        args.model_path = local.model_path
    if local.served_model_name is not None:
        args.served_model_name = local.served_model_name


def gpus_for(config: ClusterConfig, args: argparse.Namespace, *, torch: str | None) -> list[str]:
    """None on CPUs. Raises ConfigError."""
    device = getattr(args, "device", EngineConfig.device)
    if device == "cpu" or (device == "auto" and torch_cuda_major(torch) is None):
        if config.gpu_ids:
            raise ConfigError("--gpu-ids: the engines run on CPUs (--device, or a torch without CUDA); leave it out")
        return []
    return chosen_gpus(visible_gpus(os.environ.get(VISIBLE), installed_gpus), config.gpu_ids)
