"""Services of a loop besides requests and steps: weights, adapters, grammars, profiles."""

from collections.abc import Callable
from functools import partial

from engine.assembly.core import conversation_listeners
from engine.assembly.parts import EngineParts
from engine.assembly.steps import LoopSteps
from engine.config import EngineConfig
from engine.executor.profiler import TorchProfiler
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.queue import GrammarQueue, QueueLimits
from engine.grammar.reasoning import ReasoningGates
from engine.loop.adapter_control import AdapterControl
from engine.loop.kv_events import ZmqPublisher
from engine.loop.services import LoopServices, Ports
from engine.lora.peft_config import named_paths
from engine.model_files.model_config import ModelConfig
from engine.ranks.group import GroupProfiler
from engine.text.incremental import no_stops, stops_of
from engine.text.tokenizer import Tokenizer
from service.flags import ConfigError


def loop_services(
    parts: EngineParts,
    steps: LoopSteps,
    ports: Ports,
    *,
    tokenizer: Tokenizer | None,
    events: ZmqPublisher | None,
    name: str,
) -> LoopServices:
    """Load the flags' adapters, and start what compiles grammars. Raises ConfigError."""
    compiles, profiler = parts.compiles, TorchProfiler(parts.executor.call, name=name)
    adapters = _adapters(parts, ports)
    listeners = (*steps.listeners, None if parts.adapters is None else adapters, parts.storage, events)
    listeners = (*listeners, *conversation_listeners(parts.scheduler))
    return LoopServices(
        weights=parts.weights,
        trainers=parts.trainers,
        kv=parts.kv,
        memory=parts.memory,
        profiler=profiler if parts.group is None else GroupProfiler(profiler, parts.group.followers),
        grammars=grammar_queue(parts.config, parts.model, tokenizer, wakeup=ports.call_attention),
        stops=no_stops if tokenizer is None else partial(stops_of, tokenizer),
        adapters=adapters,
        gauges=steps.gauges,
        expert_loads=parts.executor.runner.expert_loads,
        name=name,
        late_compiles=lambda: 0 if compiles is None else compiles.num_late,
        updates=steps.updates,
        listeners=[listener for listener in listeners if listener is not None],
    )


def _adapters(parts: EngineParts, ports: Ports) -> AdapterControl:
    adapters = AdapterControl(
        store=parts.adapters,
        max_loaded=parts.config.max_loaded_loras,
        forget_prefixes_of=parts.scheduler.memory.cache.forget,
        reply=ports.to_frontend,
        wakeup=ports.call_attention,
    )
    for name, path in named_paths(parts.config.lora_paths).items():
        try:
            adapters.load_now(name, path)
        except ConfigError as error:
            raise ConfigError(f"--lora-paths {name}: {error}") from None
    return adapters


def grammar_queue(
    config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer | None, *, wakeup: Callable[[], None]
) -> GrammarQueue:
    assert config.max_running_requests is not None and config.grammar_backend is not None, "resolved"
    compiler = None
    if config.grammar_backend != "none":
        assert tokenizer is not None, "checked (engine/flags/tokenizer.py)"
        compiler = GrammarCompiler(
            tokenizer,
            vocab_size=model.vocab_size,
            eos_ids=model.eos_token_ids,
            any_whitespace=not config.constrained_json_disable_any_whitespace,
        )
    return GrammarQueue(
        compiler,
        gates=None if tokenizer is None else ReasoningGates(tokenizer, vocab_size=model.vocab_size),
        vocab_size=model.vocab_size,
        eos_ids=model.eos_token_ids,
        wakeup=wakeup,
        limits=QueueLimits(max_waiting=config.max_queued_requests + config.max_running_requests),
    )
