"""Flags of encoder workers. Pure."""

from dataclasses import replace

from engine.config import EngineConfig, SchedulingFlags
from engine.flags.images import max_image_tokens
from engine.flags.resolve import resolve
from engine.model_files.model_config import ModelConfig
from engine.model_files.vision_config import VisionConfig
from service.flags import ConfigError

# Of a step: encoding a token of an image, and writing its row, count one each. On a CPU more is no faster, and later images wait longer.
STEP_TOKENS = {"cpu": 2048, "cuda": 16384}


def vision_of(model: ModelConfig, model_path: str) -> VisionConfig:
    """Raises ConfigError for a text model."""
    if model.vision is None:
        raise ConfigError(
            f"--disaggregation-mode encode: the model of {model_path} sees no images; leave encode workers out"
        )
    return model.vision


def check_one_process(config: EngineConfig) -> None:
    """Raises ConfigError for ranks: images are independent, so more GPUs are more workers."""
    for name, size in (("tp", config.tp_size), ("pp", config.pp_size), ("dp", config.dp_size)):
        if size > 1:
            raise ConfigError(
                f"--{name}-size {size}: an encode worker is one process; start an encode worker for each GPU, and leave the flag out"
            )


def encoder_config(config: EngineConfig, model: ModelConfig, *, page_size: int, cuda: bool) -> EngineConfig:
    """The text model's flags keep defaults. Raises ConfigError."""
    check_one_process(config)
    plain = EngineConfig()
    resolved = resolve(
        replace(
            config,
            page_size=page_size,
            chunked_prefill_size=-1,
            max_step_time_s=0.0,
            enable_mixed_chunk=False,
            max_total_tokens=None,
            kv_cache_dtype=plain.kv_cache_dtype,
            kv_events_config=None,
            quantization=None,
            grammar_backend=None,
            schedule_policy=plain.schedule_policy,
            enable_priority_scheduling=False,
            enable_lora=False,
            lora_paths=(),
            speculative_algorithm=None,
            enable_hierarchical_cache=False,
            hicache_storage_backend=None,
            hicache_storage_dir=None,
            disable_radix_cache=False,
            test_retract=0,
        ),
        model,
        cuda=cuda,
    )
    return replace(resolved, max_prefill_tokens=config.max_prefill_tokens or STEP_TOKENS[resolved.device])


def step_images_tokens(config: SchedulingFlags, vision: VisionConfig) -> int:
    """Half of the budget of a step, or the largest image."""
    assert config.max_prefill_tokens is not None, "resolved"
    return max(config.max_prefill_tokens // 2, max_image_tokens(vision))
