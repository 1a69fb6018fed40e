"""Control calls, which change a running engine."""

from collections.abc import Callable

from engine.core.scheduler import Scheduler
from engine.loop.control import AbortAll, EngineControl, OccupationControl, ProfileControl
from engine.loop.expert_record import ExpertRecord
from engine.loop.listeners import OnStep, OpenRequests, Refuse
from engine.loop.services import LoopServices, Ports
from engine.loop.trainer_control import TrainerControl
from engine.messages import (
    ControlMessage,
    JoinTrainer,
    LeaveTrainer,
    LoadAdapter,
    RecordExperts,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    TokenOutput,
    UnloadAdapter,
)


class Controls:
    """Pauses and weights (`engine`), memory (`occupation`), adapters, trainers, profiles, experts.

    `refusals`, `on_step`: of the loop.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        services: LoopServices,
        ports: Ports,
        requests: OpenRequests,
        abort_all: AbortAll,
        refusals: list[Refuse],
        on_step: list[OnStep],
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self.adapters = services.adapters
        self.profiles = ProfileControl(services.profiler, reply=ports.to_frontend, on_step=on_step)
        self._trainers = TrainerControl(services.trainers, reply=ports.to_frontend, wakeup=ports.call_attention)
        self._experts = ExpertRecord(services.expert_loads, name=services.name, reply=ports.to_frontend)
        self.engine = EngineControl(
            scheduler=scheduler,
            weights=services.weights,
            abort_all=abort_all,
            reply=ports.to_frontend,
            wakeup=ports.call_attention,
            together=services.updates,
            also=lambda: self.occupation.values,
        )
        self.occupation = OccupationControl(
            kv=services.kv,
            weights=services.weights,
            why_busy=self._why_memory_is_used,
            flush=scheduler.flush_cache,
            update=self.engine.on_message,
            reply=ports.to_frontend,
            refusals=refusals,
        )

    def enter_when_used(self, on_turn: list[Callable[[float], None]]) -> None:
        """Note the calls of each turn, which a control enters when it is first used."""
        self._trainers.enter_when_used(on_turn)

    def on_message(self, message: ControlMessage) -> list[TokenOutput]:
        """Answer a call, now or later; return outputs to send now."""
        match message:
            case LoadAdapter() | UnloadAdapter():
                self.adapters.on_message(message)
            case JoinTrainer() | LeaveTrainer():
                self._trainers.on_message(message)
            case ReleaseMemory() | ResumeMemory():
                self.occupation.on_message(message)
            case StartProfile() | StopProfile():
                self.profiles.on_message(message)
            case RecordExperts():
                self._experts.on_message(message)
            case _:
                return self.engine.on_message(message)
        return []

    def why_closed(self) -> str | None:
        if self.occupation.released:
            return "the worker has released its memory"
        return "generation is paused" if self.engine.blocks_input else None

    def _why_memory_is_used(self) -> str:
        live = len(list(self._requests.rids())) + self.engine.num_held
        if live or not self._scheduler.idle or not self._scheduler.holds_no_kv:
            return f"{live} requests live (POST /abort_request ends them)"
        return "other weights are being read" if self.engine.updates else ""
