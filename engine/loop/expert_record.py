"""Recording of expert usage to a file for --init-expert-location."""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from engine.messages import ControlReply, RecordExperts
from service.flags import ConfigError

Loads = list[list[int]]  # by layer and expert


class ExpertRecord:
    def __init__(self, loads: Callable[[], Loads], *, name: str, reply: Callable[[ControlReply], None]) -> None:
        self._loads = loads
        self._name = name
        self._reply = reply
        self._begin: Loads | None = None
        self._end: Loads | None = None  # None while recording

    def on_message(self, message: RecordExperts) -> None:
        try:
            text, values = self._do(message)
        except ConfigError as error:
            self._reply(ControlReply(message.call_id, False, str(error), status=400))
        else:
            self._reply(ControlReply(message.call_id, True, text, values=values))

    def _do(self, message: RecordExperts) -> tuple[str, dict[str, int | str]]:
        loads = self._loads()
        if not loads:
            raise ConfigError("the model has no experts")
        if message.action == "start":
            self._begin, self._end = loads, None
            return "Start recording.", {}
        if self._begin is None:
            raise ConfigError("nothing is recorded; start it first (/start_expert_distribution_record)")
        if message.action == "stop":
            self._end = self._end or loads
            return "Stop recording.", {}
        counts = [
            [now - then for now, then in zip(*rows, strict=True)]
            for rows in zip(self._end or loads, self._begin, strict=True)
        ]
        return "Record written.", {"file": self._write(counts, message.output_dir)}

    def _write(self, counts: Loads, output_dir: str) -> str:
        try:
            folder = Path(output_dir) if output_dir else Path(tempfile.mkdtemp(prefix="tandem-experts-"))
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{self._name}-{time.strftime('%Y%m%d-%H%M%S')}.{time.monotonic_ns()}.experts.json"
            file.write_text(json.dumps({"logical_count": counts}))
        except (OSError, ValueError) as error:
            raise ConfigError(f"output_dir: {output_dir}: no file can be written there ({error})") from None
        return str(file)
