"""Pause, continuation and weight updates of a running engine.

running --PauseGeneration--> pausing --launched steps collected--> paused
    --ContinueGeneration--> running
(any) --UpdateWeights--> read in a thread --no KV of old weights in use--> taken, answered
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.core.dp_step import UpdateAgreement
from engine.core.outputs import StepEffects, refusal, refused
from engine.core.scheduler import ABORTED, Scheduler
from engine.loop.listeners import OnStep, Refuse
from engine.messages import (
    ContinueGeneration,
    ControlReply,
    FinishReason,
    GenerateRequest,
    NameWeights,
    NewTensors,
    PauseGeneration,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    TokenOutput,
    UpdateWeights,
)
from service.flags import ConfigError

log = logging.getLogger(__name__)

ControlMessage = PauseGeneration | ContinueGeneration | UpdateWeights | NameWeights
TENSORS = "tensors"
MODES = ("abort", "retract", "in_place", "block")

AbortAll = Callable[[], list[TokenOutput]]


class Weights(Protocol):
    version: str
    released: bool

    @property
    def model_path(self) -> str: ...

    @property
    def source(self) -> str:
        """Return "checkpoint", or "tensors" if some came from a trainer."""

    def release(self) -> None: ...

    def read(self, model_path: str, *, when_done: Callable[[], None], tensors: NewTensors | None) -> "Future[Any]": ...

    def take(self, model: Any, *, model_path: str, version: str | None) -> None: ...

    def discard(self, model: Any) -> None: ...


@dataclass(eq=False, kw_only=True)
class EngineControl:
    """`together`: joint weight updates with DP attention; `also`: values for an update's answer."""

    scheduler: Scheduler
    weights: Weights
    abort_all: AbortAll
    reply: Callable[[ControlReply], None]
    wakeup: Callable[[], None]
    together: UpdateAgreement | None = None
    also: Callable[[], dict[str, int | str]] = dict
    _pause: PauseGeneration | None = field(default=None, init=False)  # the active one
    _unanswered: PauseGeneration | None = field(default=None, init=False)
    _update: UpdateWeights | None = field(default=None, init=False)
    _read: Future[Any] | None = field(default=None, init=False)
    _model: Any = field(default=None, init=False)  # read and suitable; waits until no old KV is in use
    _held: dict[str, GenerateRequest] = field(default_factory=dict, init=False)

    # ---- state

    @property
    def paused(self) -> bool:
        return self._pause is not None and self._pause.mode != "block"

    @property
    def awaits_ranks(self) -> bool:
        """Ready for weights that other ranks have not taken: nothing gets memory or steps."""
        return self.together is not None and self.together.holds

    @property
    def blocks_input(self) -> bool:
        """New requests wait: paused, or draining for new weights."""
        return self._pause is not None or self._model is not None

    @property
    def updates(self) -> bool:
        return self._update is not None

    @property
    def num_held(self) -> int:
        return len(self._held)

    def hold(self, request: GenerateRequest) -> None:
        assert self.blocks_input
        self._held[request.rid] = request

    def drop(self, rid: str, reason: FinishReason = ABORTED) -> list[TokenOutput]:
        request = self._held.pop(rid, None)
        if request is None:
            return []
        return [refused(request, reason)]

    def drop_all(self) -> list[TokenOutput]:
        return [output for rid in list(self._held) for output in self.drop(rid)]

    # ---- events

    def on_message(self, message: ControlMessage) -> list[TokenOutput]:
        match message:
            case PauseGeneration():
                return self._on_pause(message)
            case ContinueGeneration():
                self._on_continue(message)
            case UpdateWeights():
                self._on_update(message)
            case NameWeights():
                return self._on_name(message)
        return []

    def on_turn(self, *, num_launched: int) -> list[TokenOutput]:
        outputs = self._on_read()
        if num_launched == 0:
            self._finish_pause()
            self._finish_update()
        return outputs

    def release(self) -> list[GenerateRequest]:
        if self.blocks_input or not self._held:
            return []
        released, self._held = list(self._held.values()), {}
        return released

    # ---- pause

    def _on_pause(self, message: PauseGeneration) -> list[TokenOutput]:
        if message.mode not in MODES:
            self._refuse(message.call_id, f"mode: must be one of {', '.join(MODES)}, got {message.mode!r}")
            return []
        if self._unanswered is not None:
            self._refuse(message.call_id, "the engine is being paused already", status=409)
            return []
        self._pause = message
        if message.mode == "block":
            log.info("generation paused (block): new requests wait, those that run go on")
            self._accept(message.call_id, "New requests wait; those that run go on.", paused=message.mode)
            return []
        self._unanswered = message
        return [*self.abort_all(), *self.drop_all()] if message.mode == "abort" else []

    def _finish_pause(self) -> None:
        pause, self._unanswered = self._unanswered, None
        if pause is None:
            return
        retracted = self.scheduler.retract_all() if pause.mode == "retract" else 0
        log.info("generation paused (%s), %d requests retracted", pause.mode, retracted)
        self._accept(pause.call_id, "Generation paused successfully.", retracted=retracted, paused=pause.mode)

    def _on_continue(self, message: ContinueGeneration) -> None:
        if self._unanswered is not None:
            self._accept(self._unanswered.call_id, "Generation paused and continued.")
        if self._pause is not None:
            log.info("generation continues, %d requests waited", self.num_held)
        self._pause = self._unanswered = None
        self._accept(message.call_id, "Generation continued successfully.", paused="")

    # ---- weights

    def _on_name(self, message: NameWeights) -> list[TokenOutput]:
        weights = self.weights
        weights.version = message.weight_version
        log.info("weights from %s (%s) are now version %s", weights.model_path, weights.source, weights.version)
        self._accept(message.call_id, f"Weight version updated to {weights.version}.", **self._described())
        return self.abort_all() if message.abort_all else []

    def _on_update(self, message: UpdateWeights) -> None:
        if self._update is not None:
            return self._refuse(message.call_id, "another update of the weights is running", status=409)
        if self.together is not None:
            self.together.begin()
        self._update = message
        path = message.model_path or self.weights.model_path
        self._read = self.weights.read(path, when_done=self.wakeup, tensors=message.tensors)

    def _on_read(self) -> list[TokenOutput]:
        if self._update is None or self._read is None or not self._read.done():
            return []
        read, self._read = self._read, None
        if (error := read.exception()) is None:
            self._model = read.result()
            return self.abort_all() if self._update.abort_all else []
        self._fail_update(self._update, error)
        return []

    def _finish_update(self) -> None:
        if self._update is None or self._model is None:
            return
        if self.together is not None and (rank := self.together.refused_by()) is not None:
            self._give_up(self._update, f"DP rank {rank} refuses these weights, so no rank takes them")
            return
        if self.paused and not self.scheduler.holds_no_kv:
            self.scheduler.retract_all()
        if self.scheduler.holds_no_kv:
            if self.together is None or self.together.all_ready():
                self._take(self._update, self._model)
        elif self.paused:
            text = "requests whose KV is being transferred hold memory, and the engine is paused; continue it first"
            self._give_up(self._update, text)

    def _give_up(self, update: UpdateWeights, text: str) -> None:
        if self.together is not None:
            self.together.refuse()
        self._refuse(update.call_id, text, status=409)
        self.weights.discard(self._model)
        self._update = self._model = None

    def _take(self, update: UpdateWeights, model: Any) -> None:
        self._update = self._model = None
        self.scheduler.forget_prefixes()
        weights, path = self.weights, update.model_path or self.weights.model_path
        weights.take(model, model_path=path, version=update.weight_version)
        if self.together is not None:
            self.together.taken()
        log.info("weights now come from %s (%s), version %s", path, weights.source, weights.version)
        self._accept(update.call_id, "Succeeded to update model weights.", **self._described())

    def _described(self) -> dict[str, int | str]:
        weights = self.weights
        source = {"weight_source": TENSORS} if weights.source == TENSORS else {}
        return {"model_path": weights.model_path, "weight_version": weights.version, **source, **self.also()}

    def _fail_update(self, update: UpdateWeights, error: BaseException) -> None:
        self._update = None
        if self.together is not None:
            self.together.refuse()
        if not isinstance(error, ConfigError):
            log.error("reading %s failed", update.model_path or "new tensors", exc_info=error)
            error = ConfigError(f"{update.model_path or 'they'} cannot be read: {error}")
        text = str(error)
        named = text.partition(": ")[0].isidentifier()  # a field of its own
        field = "model_path" if update.tensors is None else update.tensors.field
        self._refuse(update.call_id, text if named and update.tensors is not None else f"{field}: {text}")

    # ---- answers

    def _accept(self, call_id: str, message: str, **values: int | str) -> None:
        self.reply(ControlReply(call_id, True, message, values=values))

    def _refuse(self, call_id: str, message: str, *, status: int = 400) -> None:
        self.reply(ControlReply(call_id, False, message, status=status))


# ---- Profiles of a running engine, one at a time, for some steps or until stopped.


class Profiler(Protocol):
    def start(self, asked: StartProfile) -> str: ...

    def stop(self) -> str: ...


class ProfileControl:
    """The first profile adds it to `on_step`, where it stays."""

    def __init__(self, profiler: Profiler, *, reply: Callable[[ControlReply], None], on_step: list[OnStep]) -> None:
        self._profiler = profiler
        self._reply = reply
        self._on_step = on_step
        self._steps_left: int | None = None  # None: until stopped

    def on_message(self, message: StartProfile | StopProfile) -> None:
        if isinstance(message, StartProfile):
            self._start(message)
        else:
            self._stop(message.call_id)

    def _count_step(self, effects: StepEffects, now_s: float) -> None:
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self._stop(None)

    def _start(self, message: StartProfile) -> None:
        if message.num_steps is not None and message.num_steps < 1:
            return self._refuse(message.call_id, f"num_steps: must be at least 1, got {message.num_steps}")
        try:
            file = self._profiler.start(message)
        except ConfigError as error:
            return self._refuse(message.call_id, str(error))
        self._steps_left = message.num_steps
        if self._count_step not in self._on_step:
            self._on_step.append(self._count_step)
        self._reply(ControlReply(message.call_id, True, "Start profiling.", values={"file": file}))

    def _stop(self, call_id: str | None) -> None:
        self._steps_left = None
        try:
            file = self._profiler.stop()
        except ConfigError as error:
            log.error("profile: %s", error)
            if call_id is not None:
                self._refuse(call_id, str(error))
            return
        log.info("profile written to %s", file)
        if call_id is not None:
            self._reply(ControlReply(call_id, True, "Stop profiling.", values={"file": file}))

    def _refuse(self, call_id: str, message: str) -> None:
        self._reply(ControlReply(call_id, False, message, status=400))


KV, WEIGHTS, GRAPHS = "kv_cache", "weights", "cuda_graph"
TAGS = (KV, WEIGHTS, GRAPHS)  # graphs follow the weights


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

    def resume(self) -> None: ...


@dataclass(eq=False, kw_only=True)
class OccupationControl:
    """Release and return of an idle worker's KV and weight memory.

      holds both --ReleaseMemory (idle)--> released --ResumeMemory, UpdateWeights--> holds both

    Requests are refused meanwhile. Weights reload from their checkpoint, like an update.
    `why_busy()` is "" when idle. After SGLang's release_memory_occupation.
    """

    kv: KVMemory
    weights: Weights
    why_busy: Callable[[], str]
    flush: Callable[[], object]
    update: Callable[[UpdateWeights], object]
    reply: Callable[[ControlReply], None]
    refusals: list[Refuse]
    _released: list[str] = field(default_factory=list, init=False)
    _used: bool = field(default=False, init=False)

    @property
    def released(self) -> list[str]:
        if WEIGHTS in self._released and not self.weights.released:
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

    def refuse(self, message: GenerateRequest) -> TokenOutput | None:
        reason = self.refusal
        return None if reason is None else refused(message, reason)

    def on_message(self, message: ReleaseMemory | ResumeMemory) -> None:
        tags = message.tags or TAGS
        if not self._used:
            self._used = True
            self.refusals.append(self.refuse)
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
        if why := self.why_busy():
            return self._answer(call_id, f"{why}; nothing was released", status=409)
        if KV in tags and KV not in self.released:
            self.kv.release()
            self.flush()
            self._released.append(KV)
        if WEIGHTS in tags and WEIGHTS not in self.released:
            self.weights.release()
            self._released.append(WEIGHTS)
        log.info("released: %s", ", ".join(self.released))
        self._answer(call_id, f"Released: {', '.join(self.released) or 'nothing'}.")

    def _resume(self, call_id: str, tags: tuple[str, ...]) -> None:
        if back := [tag for tag in self.released if tag in tags]:
            log.info("resumed: %s", ", ".join(back))
        if KV in tags and KV in self.released:
            self.kv.resume()
            self._released.remove(KV)
        if WEIGHTS in tags and WEIGHTS in self.released:
            self.update(UpdateWeights(call_id, self.weights.model_path, tensors=NewTensors()))
            return
        self._answer(call_id, "Memory is resumed.")

    def _answer(self, call_id: str, message: str, *, status: int = 200) -> None:
        self.reply(ControlReply(call_id, status == 200, message, status=status, values=self.values))
