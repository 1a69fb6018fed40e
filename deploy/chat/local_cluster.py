"""A `tandem up` child that ends with its chat."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from service.process.start import die_with_parent

POLL_S = 0.05
END_S = 15.0  # `up` kills its processes before


class NotStarted(Exception):
    """The cluster ended early; `up` has printed why."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@contextmanager
def local_cluster(
    flags: Sequence[str], *, output: IO[str] | None = None, is_wanted: Callable[[], bool] = lambda: True
) -> Iterator[str]:
    """Yield its address, by default with a free port.

    Its lines go to `output`, by default to stderr; a session of its own keeps Ctrl-C away.
    `is_wanted`: false gives up while it starts. Raises NotStarted.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-chat-") as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-P", "-m", "deploy", "up", "--port=0", *flags, f"--ready-file={ready}"]
        up = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        try:
            yield _address(up, ready, is_wanted)
        finally:
            _end(up)


def _address(up: "subprocess.Popen[bytes]", ready: Path, is_wanted: Callable[[], bool]) -> str:
    while not ready.exists():
        if (status := up.poll()) is not None:
            raise NotStarted(status)
        if not is_wanted():
            raise NotStarted(-signal.SIGINT)
        time.sleep(POLL_S)
    return str(json.loads(ready.read_text())["router"])


def _end(up: "subprocess.Popen[bytes]") -> None:
    up.send_signal(signal.SIGINT)
    try:
        up.wait(END_S)
    except subprocess.TimeoutExpired:
        up.kill()  # its guard then kills the workers
        up.wait()
