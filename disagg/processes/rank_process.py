"""Follower process of one rank, which runs the leader's plans (engine/ranks/follower.py).

Exit status: 0 at the leader's end; OPERATING_ERROR after a reported error; else a bug.
"""

import argparse
import contextlib
import logging
import os
import select
import socket
import sys
import threading
import time
from functools import partial

import msgspec

from disagg.config import RankSpec, role_name
from disagg.processes.children import OPERATING_ERROR
from disagg.processes.joint_memory import joint_plan
from engine.loop.heartbeat import IterationClock, Watchdog, dump_when_asked, end_process
from engine.model_files.model_config import load_model_config
from engine.parallel.rendezvous import LOST_S
from engine.ranks.messages import Channel, Failed, ToFollower, follower_end
from engine.stamps import stamping
from service.flags import ConfigError
from service.process.message_stream import ChannelClosed
from service.process.start import no_collections, spare_what_lives
from service.telemetry.context import set_up_logging
from transfer_backends.contract import BackendUnavailable, EngineError, RankMemory
from transfer_backends.engines.remote import serve_engine
from transfer_backends.ports import Engine

log = logging.getLogger(__name__)

LATER = 1.5  # a waiting rank ends after its leader, which names the late one


def run(spec: RankSpec, channel: Channel[ToFollower]) -> None:
    """Raises ConfigError, BackendUnavailable, EngineError, ChannelClosed."""
    with no_collections():
        import torch

    with (
        _stamping(spec),
        torch.inference_mode(),
    ):  # as in the leader's stream: no gradients in this thread
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
        place = place_of(spec.rank, config)
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
    watchdog = Watchdog(turns, on_stall=partial(_end_with_stacks, spec.name))
    watchdog.start()
    try:
        follower.run()
    finally:
        watchdog.close()


def _serve_transfers(spec: RankSpec, engine: Engine, memory: RankMemory) -> None:
    """Serve in a thread; end the process unless the leader closed the engine."""

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


def _end_with_stacks(name: str, stalled_s: float) -> None:
    end_process(f"{name}: a step takes {stalled_s:.1f} s by now (--watchdog-timeout)")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m disagg.processes.rank_process", description="a follower of a scheduler"
    )
    parser.add_argument("--spec-json", required=True, help="RankSpec as JSON")
    spec = msgspec.json.decode(parser.parse_args(argv).spec_json, type=RankSpec)
    scheduler = spec.scheduler
    set_up_logging(
        level=scheduler.log_level,
        format=scheduler.log_format,
        process=f"{role_name(scheduler.disagg)} rank {spec.rank}",
    )
    dump_when_asked()
    channel = follower_end(spec.descriptors[1])
    try:
        run(spec, channel)
    except ChannelClosed:
        return 0
    except (ConfigError, BackendUnavailable, EngineError) as error:
        return _failed(channel, str(error), refused=True)
    except Exception as error:
        from engine.kernels.build import RanksEnded

        if isinstance(error, RanksEnded):
            if _leader_ends(channel):
                return 0
            return _failed(channel, "its connection to another machine's rank broke", refused=False)
        log.exception("rank %d cannot go on", spec.rank)
        return _failed(channel, f"{type(error).__name__}: {error}", refused=False)
    return 0


def _leader_ends(channel: Channel[ToFollower]) -> bool:
    """Return True if the leader ends the group: another machine's rank may be the cause."""
    deadline_s = time.monotonic() + 2 * LOST_S
    with contextlib.suppress(ChannelClosed):
        while select.select([channel], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            channel.receive()
        return False
    return True


def _failed(channel: Channel[ToFollower], text: str, *, refused: bool) -> int:
    with contextlib.suppress(ChannelClosed):  # the leader knows why
        channel.send(Failed(text, refused))
    return OPERATING_ERROR


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # transfer libraries keep threads that outlive a normal exit
