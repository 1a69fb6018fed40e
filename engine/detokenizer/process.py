"""The detokenizer process: pulls `ToDetokenizer`, pushes `TextBatch` to the frontend (a `StateReply` it only passes on), ends
with its parent.

Owns its two sockets and its exit. All text is decided in `engine.detokenizer.batch`.
"""

import argparse
import logging
import os
import signal

import msgspec

from engine.config import ConfigError
from engine.detokenizer.batch import Detokenizer
from engine.frontend.ipc import IpcPaths, PeerStalled, PullSocket, PushSocket
from engine.frontend.tokenizer import load_tokenizer
from engine.messages import StateReply, ToDetokenizer
from telemetry.logs import set_up_logging

log = logging.getLogger(__name__)

POLL_S = 0.2  # how late a SIGTERM or the parent's death may be noticed


class DetokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`ipc_dir`: the worker's `IpcPaths.dir`; `model_path`: where tokenizer.json is."""

    ipc_dir: str
    model_path: str
    log_level: str = "info"
    log_format: str = "text"


class _StopFlag:
    """Set by SIGTERM. Ctrl-C reaches the whole process group: the parent decides then, so SIGINT is ignored here."""

    def __init__(self) -> None:
        self.set = False
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_sigterm(self, signum: int, frame: object) -> None:
        self.set = True


def run_detokenizer(config: DetokenizerConfig) -> None:
    """Serve until SIGTERM or the parent process is gone. Raises ConfigError when the tokenizer cannot be loaded."""
    stop, parent = _StopFlag(), os.getppid()
    ipc = IpcPaths(config.ipc_dir)
    pull: PullSocket[ToDetokenizer] = PullSocket(ipc.to_detokenizer, ToDetokenizer)
    push = PushSocket(ipc.to_frontend)
    try:
        detokenizer = Detokenizer(load_tokenizer(config.model_path))
        while not stop.set and os.getppid() == parent:
            for message in pull.recv(POLL_S):
                _forward(detokenizer, message, push)
    finally:
        pull.close()
        push.close()


def _forward(detokenizer: Detokenizer, message: ToDetokenizer, push: PushSocket) -> None:
    said = message if isinstance(message, StateReply) else detokenizer.handle(message)
    if said is None:
        return
    try:
        push.send(said)
    except PeerStalled as e:
        log.error("dropped what the frontend should hear: %s", e)


def main(args: list[str] | None = None) -> int:
    """`python -m engine.detokenizer --config-json '{"ipc_dir": ..., "model_path": ...}'`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.detokenizer", description="detokenizer process of one worker"
    )
    parser.add_argument("--config-json", required=True, help="DetokenizerConfig as JSON")
    try:
        config = msgspec.json.decode(parser.parse_args(args).config_json.encode(), type=DetokenizerConfig)
        set_up_logging(level=config.log_level, format=config.log_format, process="detokenizer")
        run_detokenizer(config)
    except (ConfigError, msgspec.MsgspecError) as e:
        print(f"error: {e}", flush=True)
        return 1
    return 0
