"""Which sizes and features a group of ranks may have: what does not work is refused at start, by name. Never torch.

works with --tp-size and --pp-size                              shown by
LoRA, grammars, logprobs, hidden states, embeddings, penalties  tests/engine/test_rank_features.py
other weights, pauses, aborts, priorities, mixed chunks         the same
prefix cache, its KV events, the host tier                      the same
files of the hierarchical cache                                 tests/engine/test_rank_files.py
retraction: computed again; from the host, through prefill      tests/engine/test_ranks.py; tests/e2e/test_rank_pairs.py
layer-wise transfer, checksums                                  tests/e2e/test_rank_pairs.py
profiles (a file for each rank), role switches                  tests/e2e/test_rank_cluster.py

refused                                                         shown by
sizes that do not divide the model; --stream inline and stages  tests/engine/test_rank_rules.py
files of the hierarchical cache with --nnodes                   the same
ports of KV events that DP ranks would share                    the same
"""

import logging

from engine.config import EngineConfig
from engine.kv_events_config import check_ports
from engine.local_defaults import usable_cores
from engine.model_files.model_config import ModelConfig
from engine.nodes import check_nodes
from engine.parallel.layout import check_layout
from service.flags import ConfigError

log = logging.getLogger(__name__)


def check_sizes(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError for sizes that do not divide the model."""
    check_layout(
        model,
        tp_size=config.tp_size,
        pp_size=config.pp_size,
        partition=config.pp_layer_partition,
        kv_units=config.kv_units,
        reduce_units=config.reduce_units,
    )


def check_ranks(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError. Warns where ranks share cores."""
    check_nodes(config)
    check_sizes(config, model)
    check_ports(config.kv_events_config, dp_size=config.dp_size)
    if config.num_ranks == 1:
        return
    if config.pp_size > 1 and config.stream == "inline":
        raise ConfigError(
            f"--stream inline: --pp-size {config.pp_size} computes several steps at once; leave the flag out"
        )
    if config.hicache_storage_backend is not None and config.nnodes > 1:
        raise ConfigError(
            f"--hicache-storage-backend: the files of all {config.num_ranks} ranks lie on one machine, --nnodes is "
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


def check_device(config: EngineConfig) -> None:
    """`config` is resolved. Raises ConfigError."""
    if config.num_ranks > 1 and config.device == "cuda":
        raise ConfigError(
            f"--tp-size {config.tp_size}, --pp-size {config.pp_size}: ranks are for CPUs yet; on GPUs start more workers "
            "behind the router, or give --device cpu"
        )
