"""Supported sizes and features of rank groups; others are rejected at start.

Rejected: sizes that do not divide the model, --stream inline with stages, files of the hierarchical
cache with --nnodes, shared ports of KV events (tests/engine/ranks/test_rank_rules.py).
"""

import logging

from engine.config import EngineConfig
from engine.flags.expert_flags import check_experts
from engine.flags.kv_events_config import check_ports
from engine.flags.nodes import check_nodes
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import check_layout
from service.flags import ConfigError
from service.waiter import usable_cores

log = logging.getLogger(__name__)


def check_sizes(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError for sizes that do not divide the model."""
    check_layout(
        model,
        tp_size=config.tp_size,
        pp_size=config.pp_size,
        dp_size=config.dp_size if config.enable_dp_attention else 1,
        ep_size=config.ep_size,
        partition=config.pp_layer_partition,
        kv_units=config.kv_units,
        reduce_units=config.reduce_units,
    )


def check_ranks(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError; warns if ranks share cores."""
    check_dp_attention(config)
    check_nodes(config)
    check_sizes(config, model)
    check_experts(config, model)
    check_ports(config.kv_events_config, dp_size=config.dp_size)
    if config.num_ranks == 1 and not config.enable_dp_attention:
        return
    if config.pp_size > 1 and config.stream == "inline":
        raise ConfigError(
            f"--stream inline: --pp-size {config.pp_size} computes several steps at once; leave the flag out"
        )
    mixed = model.experts is not None or model.recurrent is not None
    if config.pp_size > 1 and config.enable_lora and mixed:
        raise ConfigError(
            f"--enable-lora: --pp-size {config.pp_size} gives stages of a model with experts or recurrent states unlike layers, of which "
            "one rank does not know another's; divide by --tp-size"
        )
    if config.hicache_storage_dir is not None and config.nnodes > 1:
        raise ConfigError(
            f"--hicache-storage-dir: the files of all {config.num_ranks} ranks lie on one machine, --nnodes is "
            f"{config.nnodes}; leave the storage out, host memory works"
        )
    if config.dp_size * config.ranks_here > (cores := usable_cores()):
        log.warning(
            "--tp-size %d, --pp-size %d, --dp-size %d: more ranks than the %d usable cores, which they share",
            config.tp_size,
            config.pp_size,
            config.dp_size,
            cores,
        )


def check_dp_attention(config: EngineConfig) -> None:
    """Raises ConfigError for flags that require or exclude --enable-dp-attention."""
    on = config.enable_dp_attention
    if config.enable_prefill_delayer and not on:
        raise ConfigError(
            "--enable-prefill-delayer: prompts of DP ranks slow each other with --enable-dp-attention alone; give both"
        )
    if not on:
        return
    if config.dp_size == 1:
        raise ConfigError(
            "--enable-dp-attention: --dp-size 1 is one DP rank; give --dp-size a divisor of --tp-size above 1, or leave the "
            "flag out"
        )
    if config.tp_size % config.dp_size:
        raise ConfigError(
            f"--enable-dp-attention: --dp-size {config.dp_size} does not divide --tp-size {config.tp_size}, which counts the "
            "ranks of all DP ranks"
        )
    for name, size in (("--pp-size", config.pp_size), ("--nnodes", config.nnodes)):
        if size > 1:
            raise ConfigError(f"--enable-dp-attention: not with {name} {size}; leave one of them out")
    if config.enable_lora or config.lora_paths:
        flag = "--enable-lora" if config.enable_lora else "--lora-paths"
        raise ConfigError(
            f"--enable-dp-attention: not with {flag}: a rank computes MLPs of other ranks' requests, whose adapters it does not "
            "know; leave one of them out"
        )
