"""Worker process on nodes other than 0: starts followers, ends with node 0."""

import logging
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from disagg.config import RankSpec, SchedulerSpec, read_secret
from disagg.processes.children import Children
from disagg.processes.rank_start import how_ended, start_rank
from disagg.processes.rendezvous import Control, Met, NodeBye, joined
from disagg.processes.session_plan import ANY_ADDRESS, SessionPlan
from engine.flags.nodes import named, ranks_of
from engine.parallel.region_plan import new_memory
from service.flags import ConfigError
from service.process.files import write_ready_file
from service.process.message_stream import ChannelClosed
from service.process.stop_signals import DRAIN
from transfer_backends.liveness import bound

LOOK_S = 0.1  # between checks of the ranks
WORD_S = 2.0  # for node 0's last message, after ranks lost its connections
LEAVES_S = 5.0  # for node 0 to leave after its drain (docs/operations.md, "Drain")

log = logging.getLogger(__name__)


def run_node(plan: SessionPlan) -> int:
    """Return the exit status. Raises ConfigError.

    SIGTERM leaves node 0 the time of a drain; a second one ends the process.
    """
    engine = plan.engine
    children = Children()
    with ExitStack() as undo:
        met = undo.enter_context(
            joined(engine, plan.disagg, secret=read_secret(plan.disagg.cluster_secret_file) or b"")
        )
        undo.callback(children.end)
        _start(plan, met, children)
        ranks = named(ranks_of(engine.node_rank, engine))
        log.info("%s of %d on this machine; node 0 serves (%s)", ranks, engine.num_ranks, engine.dist_init_addr)
        write_ready_file(plan.server.ready_file, {"node_rank": engine.node_rank, "pid": os.getpid()})
        with leaving_node_0_time(plan.server.drain_timeout_s) as is_over:
            return watch_node_0(plan, met.controls[0], children, is_over)


@contextmanager
def leaving_node_0_time(drain_timeout_s: float) -> Iterator[Callable[[], bool]]:
    at_once = signal.getsignal(signal.SIGTERM)
    ends_s = math.inf

    def on_drain(signum: int, frame: object) -> None:
        nonlocal ends_s
        if ends_s == math.inf:
            ends_s = time.monotonic() + drain_timeout_s + LEAVES_S
        if signum == signal.SIGTERM:
            signal.signal(signal.SIGTERM, at_once)

    for number in (signal.SIGTERM, DRAIN):
        signal.signal(number, on_drain)
    yield lambda: time.monotonic() >= ends_s


def _start(plan: SessionPlan, met: Met, children: Children) -> None:
    engine, server = plan.engine, plan.server
    scheduler = SchedulerSpec(
        engine=engine,
        disagg=plan.disagg,
        ipc_dir="",
        control_host=own_host(plan, met),
        bootstrap=None,
        log_level=server.log_level,
        log_format=server.log_format,
    )
    memory = new_memory(met.region)
    try:
        for rank in ranks_of(engine.node_rank, engine):
            wires = met.of_rank(rank)
            channels = [met.plan_of(rank)]
            if plan.role != "null":
                channels.append(met.engine_of(rank))
            spec = RankSpec(
                scheduler=scheduler,
                rank=rank,
                region=met.region,
                descriptors=(memory, *(sock.fileno() for sock in channels)),
                wires={end: sock.fileno() for end, sock in wires.items()},
            )
            start_rank(children, spec)
            for sock in (*channels, *wires.values()):
                sock.close()  # the rank owns it from now on, so that its end ends the connection
    finally:
        os.close(memory)


def own_host(plan: SessionPlan, met: Met) -> str:
    """Raises ConfigError."""
    assert met.host is not None, "not node 0"
    host = plan.disagg.disaggregation_control_host or met.host
    if host in ANY_ADDRESS:  # a peer would connect to its own machine
        raise ConfigError(
            f"--disaggregation-control-host {host}: peers need one address of this machine; without the flag it is {met.host}"
        )
    try:
        with bound(host):
            return host
    except OSError as error:
        raise ConfigError(
            f"--disaggregation-control-host {host}: not an address of node {plan.engine.node_rank} ({error.strerror or error}); "
            f"each node has its own; without the flag it is {met.host}, from which it came to node 0"
        ) from None


def watch_node_0(plan: SessionPlan, control: Control, children: Children, is_over: Callable[[], bool]) -> int:
    """Return the exit status."""
    while (dead := children.first_dead()) is None:
        if is_over():
            log.warning("node 0 (%s) has not ended within --drain-timeout; it loses its ranks here", control.peer)
            return 0
        if _is_there(control, LOOK_S):
            dead = children.first_dead()  # node 0 may have noticed it first
            if dead is None or dead[1].poll() == 0:
                return _end_of(plan, control)
            break
    assert dead is not None, "the loop ends with one"
    name, process = dead
    if process.poll() == 0 and _is_there(control, WORD_S):
        return _end_of(plan, control)
    return _failed(f"{name} of {plan.engine.num_ranks} (pid {process.pid}) {how_ended(process)}; node 0 ends, too")


def _is_there(control: Control, within_s: float) -> bool:
    return bool(select.select([control], [], [], within_s)[0])


def _end_of(plan: SessionPlan, control: Control) -> int:
    address = plan.engine.dist_init_addr
    try:
        if isinstance(control.receive(within_s=WORD_S), NodeBye):
            log.info("node 0 (%s) has ended", address)
            return 0
    except ChannelClosed as error:
        return _failed(f"node 0 (--dist-init-addr {address}) is gone ({error}); its log may say why")
    return _failed(f"node 0 (--dist-init-addr {address}) sent what no node sends")


def _failed(text: str) -> int:
    print(f"tandem serve: error: {text}", file=sys.stderr, flush=True)
    return 1
