"""`tandem up`: a whole cluster on this machine."""

import argparse
import asyncio
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.flags import config_from
from deploy.launcher.display import Member, make_display, summary_text
from deploy.launcher.fork_servers import engine_server, http_fork_server
from deploy.launcher.mps import Sharing, mps_for
from deploy.launcher.plan import Gpus, ProcessSpec, num_ports, plan_cluster, shared_groups, with_env
from deploy.launcher.probe import free_ports, get_json
from deploy.launcher.process import Child
from deploy.launcher.roles import ClusterConfig
from deploy.launcher.supervisor import RestartPolicy, Supervisor
from deploy.launcher.up_flags import (
    build_parser,
    flags_by_role,
    gpus_for,
    model_path_of,
    require_extras,
    router_args,
    set_local_model,
)
from engine.config import MEM_FRACTION_OF, ServerConfig
from service.http.listening import require_free, url_of
from service.process.files import clear_ready_file, write_ready_file
from service.security.keys import ROUTER_SECRET, KeyRing
from service.waiter import usable_cores
from transfer_backends.engines.wheels import installed_torch

INFO_TIMEOUT_S = 5.0


def run(argv: Sequence[str]) -> int:
    """Run until Ctrl-C."""
    args = build_parser().parse_strict(argv)
    config = config_from(args, ClusterConfig)
    require_extras(config)
    if config.port:
        require_free(config.host, config.port, flag="--port")
    set_local_model(args)
    clear_ready_file(config.ready_file)
    log_dir = make_log_dir(config.run_dir)
    gpus = gpus_for(config, args, torch=installed_torch())
    specs, front = plan(config, args, gpus=gpus)
    with (
        mps_for(shared_groups(specs), percentage=config.mps_prefill_percentage, run_dir=log_dir) as mps,
        engine_server(
            specs, model=model_path_of(args), threads=getattr(args, "num_threads", None), log_dir=log_dir
        ) as server,
        http_fork_server(count=len(specs), log_dir=log_dir) as http_server,
    ):
        for name, env in mps.env.items():
            specs = with_env(specs, [name], env)
        specs = with_env(specs, [spec.name for spec in specs if spec.ranks], server)
        specs = with_env(specs, [spec.name for spec in specs], {**http_server, **own_secret(config, args)})
        return asyncio.run(_supervise(config, vars(args), specs=specs, front=front, log_dir=log_dir, mps=mps))


def own_secret(config: ClusterConfig, args: argparse.Namespace) -> dict[str, str]:
    """The environment, empty if the secret is in a file or there is no router."""
    if config.unified or getattr(args, "cluster_secret_file", None) is not None or os.environ.get(ROUTER_SECRET):
        return {}
    return {ROUTER_SECRET: secrets.token_hex(32)}


def plan(config: ClusterConfig, args: argparse.Namespace, *, gpus: Sequence[str] = ()) -> tuple[list[ProcessSpec], str]:
    front, *free = [config.port, *free_ports(num_ports(config))] if config.port else free_ports(num_ports(config) + 1)
    specs = plan_cluster(
        config,
        front=front,
        free=free,
        cores=usable_cores(),
        gpus=Gpus(gpus, getattr(args, "mem_fraction_static", MEM_FRACTION_OF["cuda"])),
        flags=flags_by_role(config, args),
        router_args=router_args(args),
    )
    return specs, url_of(config.host, front)


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
    mps: Sharing,
) -> int:
    display = make_display()
    display.message(f"tandem up: {', '.join(spec.name for spec in specs)} (logs: {log_dir})")
    for note in mps.notes:
        display.message(f"tandem up: {note}")

    def write_ready(children: Sequence[Child]) -> None:
        try:
            write_ready_file(config.ready_file, ready_info(children, front=front))
        except OSError as error:
            display.message(f"tandem up: error: --ready-file: {config.ready_file}: {error.strerror or error}")

    supervisor = Supervisor(
        specs,
        log_dir=log_dir,
        display=display,
        start_timeout_s=config.start_timeout_s,
        drain_timeout_s=given.get("drain_timeout_s", ServerConfig.drain_timeout_s),
        restarts=RestartPolicy(always=config.restart == "always"),
        on_again=write_ready,
        domains=mps.domains,
    )

    async def on_ready(children: Sequence[Child]) -> None:
        api_key = KeyRing(key=given.get("api_key"), file=given.get("api_key_file")).first
        members = [await asyncio.to_thread(_member, child, api_key) for child in children]
        names = [given.get("served_model_name"), *(m.info.get("served_model_name") for m in members), "default"]
        text = summary_text(
            members,
            front=front,
            backend=None if config.unified else config.transfer_backend,
            log_dir=log_dir,
            model=next(name for name in names if name),
            shipped=not given.get("model_path"),
            auth=api_key is not None,
        )
        print(text, flush=True)
        write_ready(children)

    return await supervisor.run(on_ready)


def ready_info(children: Sequence[Child], *, front: str) -> dict[str, Any]:
    """Addresses and current pids, for the ready file."""
    workers = [{"role": c.spec.role, "url": c.spec.url, "pid": c.pid} for c in children if c.spec.role != "router"]
    return {"router": front, "workers": workers}


def _member(child: Child, api_key: str | None) -> Member:
    spec = child.spec
    is_worker = spec.role != "router"
    info = get_json(f"{spec.url}/get_server_info", timeout_s=INFO_TIMEOUT_S, api_key=api_key) if is_worker else {}
    return Member(name=spec.name, role=spec.role, url=spec.url, pid=child.pid, info=info)
