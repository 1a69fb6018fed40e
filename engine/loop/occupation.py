"""Release and return of an idle worker's KV and weight memory.

  holds both --ReleaseMemory (idle)--> released --ResumeMemory, UpdateWeights--> holds both

Requests are refused meanwhile. Weights reload from their checkpoint, like an update. After SGLang's
release_memory_occupation, for training on the same machine.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from engine.core.outputs import refusal
from engine.messages import ControlReply, FinishReason, ReleaseMemory, ResumeMemory, UpdateWeights
from service.flags import ConfigError

KV, WEIGHTS, GRAPHS = "kv_cache", "weights", "cuda_graph"
TAGS = (KV, WEIGHTS, GRAPHS)  # graphs follow the weights

log = logging.getLogger(__name__)


class KVMemory(Protocol):
    def release(self) -> None:
        """Raises ConfigError, changing nothing."""

    def resume(self) -> None:
        """Restore zeroed memory."""


class FixedKV:
    """KV memory that cannot be released, with the reason and remedy."""

    def __init__(
        self, why: str = "the KV memory of this worker cannot be released; name the tag weights alone"
    ) -> None:
        self._why = why

    def release(self) -> None:
        raise ConfigError(self._why)

    def resume(self) -> None:
        """Never released."""


class ReleasedWeights(Protocol):
    model_path: str

    @property
    def released(self) -> bool: ...

    def release(self) -> None: ...


class OccupationControl:
    """Controller; `why_busy()` is "" when idle, `flush()` drops prefixes, `update` reloads."""

    def __init__(
        self,
        *,
        kv: KVMemory,
        weights: ReleasedWeights,
        why_busy: Callable[[], str],
        flush: Callable[[], object],
        update: Callable[[UpdateWeights], object],
        reply: Callable[[ControlReply], None],
    ) -> None:
        self._kv = kv
        self._weights = weights
        self._why_busy = why_busy
        self._flush = flush
        self._update = update
        self._reply = reply
        self._released: list[str] = []
        self._used = False

    @property
    def released(self) -> list[str]:
        if WEIGHTS in self._released and not self._weights.released:
            self._released.remove(WEIGHTS)
        return self._released

    @property
    def values(self) -> dict[str, int | str]:
        return {"released": ",".join(self.released)} if self._used else {}

    @property
    def refusal(self) -> FinishReason | None:
        if not self.released:
            return None
        text = f"the worker has released its memory ({', '.join(self.released)}): POST /resume_memory_occupation"
        return refusal(text, status=503)

    def on_message(self, message: ReleaseMemory | ResumeMemory) -> None:
        tags, self._used = message.tags or TAGS, True
        if unknown := [tag for tag in tags if tag not in TAGS]:
            return self._answer(message.call_id, f"tags: must be of {', '.join(TAGS)}, got {unknown[0]!r}", status=400)
        try:
            if isinstance(message, ReleaseMemory):
                self._release(message.call_id, tags)
            else:
                self._resume(message.call_id, tags)
        except ConfigError as error:
            self._answer(message.call_id, str(error), status=400)

    def _release(self, call_id: str, tags: tuple[str, ...]) -> None:
        if why := self._why_busy():
            return self._answer(call_id, f"{why}; nothing was released", status=409)
        if KV in tags and KV not in self.released:
            self._kv.release()
            self._flush()
            self._released.append(KV)
        if WEIGHTS in tags and WEIGHTS not in self.released:
            self._weights.release()
            self._released.append(WEIGHTS)
        log.info("released: %s", ", ".join(self.released))
        self._answer(call_id, f"Released: {', '.join(self.released) or 'nothing'}.")

    def _resume(self, call_id: str, tags: tuple[str, ...]) -> None:
        if KV in tags and KV in self.released:
            self._kv.resume()
            self._released.remove(KV)
        if WEIGHTS in tags and WEIGHTS in self.released:
            self._update(UpdateWeights(call_id, self._weights.model_path))
            return
        self._answer(call_id, "Memory is resumed.")

    def _answer(self, call_id: str, message: str, *, status: int = 200) -> None:
        self._reply(ControlReply(call_id, status == 200, message, status=status, values=self.values))
