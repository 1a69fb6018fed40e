"""Flags incompatible with --enable-pdmux."""

from engine.config import EngineConfig, SchedulingFlags
from engine.model_files.model_config import ModelConfig
from service.flags import ConfigError

FLAG = "--enable-pdmux"
ITL_FLAG = "--pdmux-itl"


def check_pdmux(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError for what two streams cannot share yet."""
    if not config.enable_pdmux:
        if config.pdmux_itl_s is not None:
            raise ConfigError(f"{ITL_FLAG}: is the objective of {FLAG}; give both")
        return
    lora = "--enable-lora" if config.enable_lora else "--lora-paths"
    refused = (
        ("--enable-mixed-chunk", bool(config.enable_mixed_chunk), "decodes would ride in steps of prompts"),
        ("--stream inline", config.stream == "inline", "a step would run while the next one waits to be launched"),
        (f"--tp-size {config.tp_size}", config.tp_size > 1, "ranks run the steps of one lane"),
        (f"--pp-size {config.pp_size}", config.pp_size > 1, "stages run the steps of one lane"),
        (lora, config.enable_lora or bool(config.lora_paths), "one batch at a time has its adapters in the layers"),
        ("--enable-hierarchical-cache", config.enable_hierarchical_cache, "its copies have the order of one lane"),
        (
            f"--speculative-algorithm {config.speculative_algorithm}",
            config.speculative_algorithm is not None,
            "drafts follow the steps of one lane",
        ),
    )
    for name, given, why in refused:
        if given:
            raise ConfigError(f"{FLAG}: not with {name}: {why}; leave one of them out")
    if model.recurrent is not None:
        raise ConfigError(
            f"{FLAG}: not with the recurrent layers of --model-path {config.model_path}, whose states have the order of one lane; "
            "leave the flag out"
        )


def itl_objective_s(config: SchedulingFlags) -> float | None:
    """The objective of decode's inter-token latency, if given."""
    return config.pdmux_itl_s


def check_pdmux_role(config: SchedulingFlags, mode: str, *, retracted_kv: str) -> None:
    """Raises ConfigError."""
    if not config.enable_pdmux:
        return
    if mode not in ("null", "decode"):
        raise ConfigError(
            f"{FLAG}: not with --disaggregation-mode {mode}, whose KV or features leave in the order of one lane; leave one of them out"
        )
    if retracted_kv == "host" and mode == "decode":
        raise ConfigError(
            f"{FLAG}: not with --disaggregation-decode-retraction-backup host, whose copies have the order of one lane; leave one of them out"
        )
