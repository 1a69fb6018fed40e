"""A batch of three requests that shrinks to one, and two small random models, for engines that take decode steps another way."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks import random_model
from engine.core.request import Grammar
from engine.messages import LogprobOptions
from tests.engine.engine_in_process import EngineInProcess
from tests.models.tiny_checkpoints import edit_tensors

SAMPLING = {
    "a": {"temperature": 0.0},
    "b": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "presence_penalty": 0.5},
    "c": {"temperature": 0.8, "logit_bias": {60: 2.0}},
}
PROMPTS = {"a": [20, 30, 40], "b": list(range(20, 37)), "c": [60, 61, 62, 63, 64, 65]}


def two_models(folder: Path, *, layers: int, hidden: int, intermediate: int) -> tuple[str, str]:
    """Two models of one shape."""
    old, new = folder / "old", folder / "new"
    for path in (old, new):
        random_model.write_model(path, layers=layers, hidden=hidden, intermediate=intermediate)
    name = "model.embed_tokens.weight"
    edit_tensors(new / "model.safetensors", lambda weights: weights.update({name: weights[name].roll(7, 0)}))
    return str(old), str(new)


def run(
    engine: EngineInProcess,
    lengths: dict[str, int],
    *,
    grammars: Mapping[str, Grammar] = MappingProxyType({}),
    turn: Callable[[], object] | None = None,
) -> tuple[dict[str, list[int]], list[float]]:
    """Tokens, and the logprobs of all of them. `grammars` of some requests. `turn`: what runs the engine, if others turn with it."""
    engine.tokens, engine.logprobs = {}, {}
    for rid, prompt in PROMPTS.items():
        grammar, wanted = grammars.get(rid), LogprobOptions(-1, 0)
        engine.add(rid, prompt, logprobs=wanted, grammar=grammar, max_new_tokens=lengths[rid], seed=3, **SAMPLING[rid])
    (turn or engine.run)()
    return engine.tokens, [entry.logprob for rid in PROMPTS for entry in engine.logprobs[rid]]
