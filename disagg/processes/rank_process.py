"""Follower process of one rank, which runs the leader's plans (engine/ranks/follower.py).

Exit status: 0 at the leader's end; OPERATING_ERROR after a reported error; else a bug.
"""

import argparse
import contextlib
import logging
import os
import select
import sys
import time

import msgspec

from disagg.config import RankSpec, role_name
from disagg.processes.children import OPERATING_ERROR
from disagg.processes.rank_run import run
from engine.loop.heartbeat import dump_when_asked
from engine.parallel.rendezvous import LOST_S
from engine.ranks.messages import Channel, Failed, ToFollower, follower_end
from service.flags import ConfigError
from service.process.message_stream import ChannelClosed
from service.telemetry.context import set_up_logging
from transfer_backends.contract import BackendUnavailable, EngineError

log = logging.getLogger(__name__)


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
    """True if the leader ends the group: another machine's rank may be the cause."""
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
