"""Flags of expert placement and EPLB."""

import json
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, ParallelFlags
from engine.model_files.experts_config import ExpertsConfig
from engine.model_files.model_config import ModelConfig
from engine.parallel.expert_placement import ExpertPlan, Placement, balanced
from service.flags import ConfigError

TRIVIAL = "trivial"
PLACES, LOADS = "physical_to_logical_map", "logical_count"  # SGLang's names


def check_experts(config: ParallelFlags, model: ModelConfig) -> None:
    """Raises ConfigError."""
    for flag, given in (
        ("--enable-eplb", config.enable_eplb),
        ("--ep-num-redundant-experts", config.ep_num_redundant_experts),
        ("--init-expert-location", config.init_expert_location != TRIVIAL),
    ):
        if given and config.ep_size == 1:
            raise ConfigError(
                f"{flag}: --ep-size 1 gives each rank a part of every expert; give --ep-size, the number of --tp-size"
            )
    if config.ep_size == 1:
        return
    assert model.experts is not None, "checked with the sizes"
    slots = model.experts.count + config.ep_num_redundant_experts
    if slots % config.ep_size:
        more = -(-slots // config.ep_size) * config.ep_size - model.experts.count
        raise ConfigError(
            f"--ep-num-redundant-experts {config.ep_num_redundant_experts}: with the model's {model.experts.count} experts these are "
            f"{slots}, which --ep-size {config.ep_size} does not divide; give {more}"
        )


def expert_plan(config: EngineConfig, model: ModelConfig) -> ExpertPlan:
    """Raises ConfigError for a file that does not fit."""
    if config.ep_size == 1:
        return ExpertPlan()
    assert model.experts is not None
    return ExpertPlan(
        redundant=config.ep_num_redundant_experts,
        start=_start(config, model, model.experts),
        rebalance_every=config.eplb_rebalance_num_iterations if config.enable_eplb else 0,
        groups=model.experts.groups,
        nodes=config.nnodes,
    )


def _start(config: ParallelFlags, model: ModelConfig, experts: ExpertsConfig) -> dict[int, Placement]:
    given = config.init_expert_location
    if given == TRIVIAL:
        return {}
    slots = experts.count + config.ep_num_redundant_experts
    found = _read(Path(given))
    if PLACES in found:
        rows = _table(given, PLACES, found[PLACES], (model.num_layers, slots))
        for layer, row in enumerate(rows):
            if not model.is_dense(layer) and set(row) != set(range(experts.count)):
                raise ConfigError(
                    f"--init-expert-location {given}: {PLACES}[{layer}] must name each of the experts 0..{experts.count - 1}, and none else"
                )
        return {layer: tuple(row) for layer, row in enumerate(rows)}
    rows = _table(given, LOADS, found.get(LOADS), (model.num_layers, experts.count))
    return {
        layer: balanced(row, slots=slots, ranks=config.ep_size, groups=experts.groups, nodes=config.nnodes)
        for layer, row in enumerate(rows)
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--init-expert-location {path}: cannot be read as JSON ({error}); give {TRIVIAL} or a file"
        ) from None
    if not isinstance(found, dict) or not found.keys() & {PLACES, LOADS}:
        raise ConfigError(f"--init-expert-location {path}: must be an object with {PLACES} or {LOADS}")
    return found


def _table(given: str, name: str, rows: Any, shape: tuple[int, int]) -> list[list[int]]:
    """Check integers >= 0. Raises ConfigError."""
    layers, width = shape
    fits = isinstance(rows, list) and len(rows) == layers
    if not fits or not all(isinstance(row, list) and len(row) == width for row in rows):
        raise ConfigError(
            f"--init-expert-location {given}: {name} must be {layers} lists, one for each layer, of {width} numbers"
        )
    if not all(type(value) is int and value >= 0 for row in rows for value in row):
        raise ConfigError(f"--init-expert-location {given}: {name} must hold whole numbers from 0")
    found: list[list[int]] = rows
    return found
