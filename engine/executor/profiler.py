"""Torch profiler for some steps, controlled in the stream, since torch records its own thread."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from engine.messages import StartProfile
from service.flags import ConfigError

ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}


class TorchProfiler:
    """`in_order` is `Executor.call`; `name` is in file names."""

    def __init__(self, in_order: Callable[[Callable[[], object]], object], *, name: str) -> None:
        self._in_order = in_order
        self._name = name
        self._running: profile | None = None
        self._file = Path()

    def start(self, asked: StartProfile) -> str:
        """Return the file that `stop` will write. Raises ConfigError."""
        if self._running is not None:
            raise ConfigError("a profile is running; stop it first (/stop_profile)")
        chosen = _activities(asked.activities)
        self._file = (
            _folder(asked.output_dir)
            / f"{self._name}-{time.strftime('%Y%m%d-%H%M%S')}.{time.monotonic_ns()}.trace.json"
        )
        running = profile(activities=chosen, with_stack=asked.with_stack, record_shapes=asked.record_shapes)
        self._in_order(running.start)
        self._running = running
        return str(self._file)

    def stop(self) -> str:
        """Write the file for Perfetto. Raises ConfigError."""
        running, self._running = self._running, None
        if running is None:
            raise ConfigError("no profile is running; start one first (/start_profile)")
        self._in_order(running.stop)
        try:
            running.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"output_dir: {self._file} cannot be written ({error})") from None
        return str(self._file)


def _activities(names: tuple[str, ...]) -> list[ProfilerActivity]:
    for name in names:
        if name not in ACTIVITIES:
            raise ConfigError(f"activities: {name!r} is not one of {', '.join(ACTIVITIES)}")
    if "GPU" in names and not torch.cuda.is_available():
        raise ConfigError("activities: GPU: there is no CUDA device here")
    usable = [name for name in ACTIVITIES if name == "CPU" or torch.cuda.is_available()]
    return [ACTIVITIES[name] for name in dict.fromkeys(names or usable)]  # torch refuses duplicates


def _folder(output_dir: str) -> Path:
    if not output_dir:
        return Path(tempfile.mkdtemp(prefix="tandem-profile-"))
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:
        raise ConfigError(f"output_dir: {output_dir}: no file can be written there ({error})") from None
