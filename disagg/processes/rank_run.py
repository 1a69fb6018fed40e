"""Run of a rank: it joins its group, builds its engine and follows the leader's plans."""

import contextlib
import os
import socket
import threading
import time
from functools import partial

from disagg.config import RankSpec
from disagg.processes.joint_memory import joint_plan
from engine.loop.heartbeat import IterationClock, Watchdog, end_process
from engine.model_files.model_config import load_model_config
from engine.ranks.messages import Channel, ToFollower
from engine.stamps import stamping
from service.process.start import no_collections, spare_what_lives
from transfer_backends.contract import RankMemory
from transfer_backends.engines.remote import serve_engine
from transfer_backends.ports import Engine

LATER = 1.5  # a waiting rank ends after its leader, which names the late one


def run(spec: RankSpec, channel: Channel[ToFollower]) -> None:
    """Raises ConfigError, BackendUnavailable, EngineError, ChannelClosed."""
    with no_collections():
        import torch

    with _stamping(spec), torch.inference_mode():  # as in the leader's stream: no gradients in this thread
        _run(spec, channel)


def _stamping(spec: RankSpec) -> contextlib.AbstractContextManager[None]:
    folder = spec.scheduler.ipc_dir
    return stamping(folder, spec.scheduler.trace_name(spec.rank)) if folder else contextlib.nullcontext()


def _run(spec: RankSpec, channel: Channel[ToFollower]) -> None:
    with no_collections():
        import torch

        from disagg.transfer_engine import engine_of, engine_use, memory_of
        from engine.assembly.follower import build_follower
        from engine.parallel.process_groups import joined
        from engine.parallel.region import SharedRegion
        from engine.ranks.links import Joint, links_of, place_of

    config = spec.scheduler.engine
    joint = None
    if spec.scheduler.joint is not None:
        joint = Joint(SharedRegion.open(spec.scheduler.joint.memory, joint_plan(config)), spec.scheduler.dp_rank)
        os.close(spec.scheduler.joint.memory)
    region = SharedRegion.open(spec.descriptors[0], spec.region, ends_with=None if joint is None else joint.region)
    os.close(spec.descriptors[0])
    turns = IterationClock(limit_s=LATER * config.watchdog_timeout_s)
    groups = None
    if spec.store is not None:
        place = place_of(spec.rank, config, dp_rank=spec.scheduler.dp_rank)
        groups = joined(spec.store, place, torch.device("cuda", 0), timeout_s=config.dist_timeout_s)
    wires = {end: socket.socket(fileno=descriptor) for end, descriptor in spec.wires.items()}
    follower, pools = build_follower(
        config,
        load_model_config(config.model_path),
        channel,
        connect=partial(links_of, region, spec.rank, wires=wires, joint=joint, groups=groups),
        use=engine_use(spec.scheduler.disagg, name=spec.scheduler.trace_name(spec.rank)),
        turning=partial(_note, turns),
    )
    if len(spec.descriptors) > 2:
        _serve_transfers(spec, engine_of(spec.scheduler, pools.kv), memory_of(pools))
    spare_what_lives()
    turns.loaded()
    step = f"{spec.name}: a step takes"
    watchdog = Watchdog(
        turns, on_stall=lambda stalled_s: end_process(f"{step} {stalled_s:.1f} s by now (--watchdog-timeout)")
    )
    watchdog.start()
    try:
        follower.run()
    finally:
        watchdog.close()


def _serve_transfers(spec: RankSpec, engine: Engine, memory: RankMemory) -> None:
    """The process ends unless the leader closed the engine."""

    def serve() -> None:
        disagg = spec.scheduler.disagg
        receives = disagg.disaggregation_mode == "decode" or disagg.prefix_fetch
        sock = socket.socket(fileno=spec.descriptors[2])
        if not serve_engine(engine, memory, sock, receives=receives, host=spec.scheduler.control_host):
            os._exit(0)

    threading.Thread(target=serve, name="transfer engine", daemon=True).start()


def _note(turns: IterationClock, busy: bool) -> None:
    if busy:
        turns.turning(time.monotonic())
    else:
        turns.resting()
