"""The --speculative flags, and what excludes speculation."""

from dataclasses import replace

from engine.config import EngineConfig, SpeculativeFlags
from engine.model_files.drafter_config import (
    DRAFT_PATH,
    EAGLE,
    EAGLE3,
    NEXTN,
    STANDALONE,
    DrafterConfig,
    load_eagle,
    load_standalone,
    nextn_of,
)
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import check_layout
from service.flags import ConfigError

FLAG = "--speculative-algorithm"
NGRAM = "NGRAM"
FORCED_ROWS = 8  # forced by the grammar of a request, without the flag
FORCED_REQUESTS = 8  # with forced rows in a step; their states take memory twice
NGRAM_ROWS = 32
NEEDED = {STANDALONE: "a small model of the same tokenizer", EAGLE3: "a checkpoint that is trained for the model"}
TREE_ROWS = 16  # of a request with a draft tree: topk ** 2 tokens per step, mostly unlikely
MODEL_STEPS = 4  # tokens drafted: early ones are mostly accepted, and each costs a pass


def check_speculation(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError."""
    algorithm = config.speculative_algorithm
    _check_model_flags(config)
    if algorithm is None:
        return
    if why := _why_not(config):
        raise ConfigError(f"{FLAG} {algorithm}: {why}")
    if topk_of(config) > 1 and (why := _why_no_trees(model)):
        raise ConfigError(f"--speculative-eagle-topk {topk_of(config)}: {why}; give 1")


def _check_model_flags(config: SpeculativeFlags) -> None:
    algorithm, by_model = config.speculative_algorithm, drafts_by_model(config)
    given = {
        DRAFT_PATH: config.speculative_draft_model_path,
        "--speculative-num-steps": config.speculative_num_steps,
        "--speculative-eagle-topk": config.speculative_eagle_topk,
    }
    for flag, value in given.items():
        if value is not None and not by_model:
            raise ConfigError(
                f"{flag} {value}: {FLAG} {algorithm or 'is not given, and'} drafts by no model; leave it out"
            )
    path = config.speculative_draft_model_path
    if algorithm in NEEDED and path is None:
        raise ConfigError(f"{FLAG} {algorithm}: needs {DRAFT_PATH}, {NEEDED[algorithm]}")
    if algorithm == NEXTN and path is not None:
        raise ConfigError(f"{DRAFT_PATH} {path}: NEXTN reads layers of the model's own checkpoint; leave it out")
    steps, rows = config.speculative_num_steps, config.speculative_num_draft_tokens
    if topk_of(config) == 1 and steps is not None and rows is not None and rows != steps + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens {rows}: a step computes the last known token and --speculative-num-steps {steps} drafts; "
            f"give {steps + 1}, or leave one of them out"
        )


def _why_not(config: EngineConfig) -> str:
    """Return why decode steps have one token per request, empty if not."""
    if config.pp_size > 1:
        return f"--pp-size {config.pp_size} has other tokens in flight; leave it out, or give --tp-size"
    return ""


def _why_no_trees(model: ModelConfig) -> str:
    if model.recurrent is not None:
        return "a recurrent state follows one path of drafts"
    if model.latent is not None and model.latent.index is not None:
        return "sparse attention chooses among the tokens of one path"
    return ""


def drafts_by_model(config: SpeculativeFlags) -> bool:
    return config.speculative_algorithm not in (None, NGRAM)


def drafts_by_ngrams(config: SpeculativeFlags) -> bool:
    return config.speculative_algorithm == NGRAM


def with_drafter(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Add the draft model, if any. Raises ConfigError if it does not fit."""
    if not drafts_by_model(config):
        return model
    drafter = _drafter(config, model)
    _check_size(config, drafter)
    return replace(model, drafter=drafter)


def _drafter(config: SpeculativeFlags, model: ModelConfig) -> DrafterConfig:
    algorithm, path = config.speculative_algorithm, config.speculative_draft_model_path
    if algorithm == NEXTN or (algorithm == EAGLE and path is None):  # both are SGLang's names
        return nextn_of(model, flag=f"{FLAG} {algorithm}")
    assert algorithm is not None and path is not None, "resolved"
    return load_standalone(path, model) if algorithm == STANDALONE else load_eagle(path, model, kind=algorithm)


def _check_size(config: EngineConfig, drafter: DrafterConfig) -> None:
    assert config.context_length is not None, "resolved"
    if not drafter.path:
        return
    layers, flag, tp = drafter.layers, f"{DRAFT_PATH} {drafter.path}", config.attention_tp_size
    if drafter.kind == STANDALONE and layers.max_position_embeddings < config.context_length:
        raise ConfigError(
            f"{flag}: it has {layers.max_position_embeddings} positions, the model's context {config.context_length}; give "
            f"--context-length {layers.max_position_embeddings}, or another drafter"
        )
    try:
        check_layout(
            layers,
            tp_size=tp,
            pp_size=1,
            ep_size=1 if layers.experts is None or config.ep_size == 1 else tp,
            kv_units=config.kv_units,
            reduce_units=config.reduce_units,
        )
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None


def rows_of_request(config: SpeculativeFlags) -> int:
    if config.speculative_algorithm is None:
        return FORCED_ROWS
    if config.speculative_algorithm == NGRAM:
        default = NGRAM_ROWS
    else:
        default = 1 + passes_of(config) if topk_of(config) == 1 else TREE_ROWS
    return config.speculative_num_draft_tokens or default


def topk_of(config: SpeculativeFlags) -> int:
    return config.speculative_eagle_topk or 1


def passes_of(config: SpeculativeFlags) -> int:
    rows = config.speculative_num_draft_tokens
    by_rows = rows - 1 if rows is not None and topk_of(config) == 1 else MODEL_STEPS
    return config.speculative_num_steps or by_rows


def may_draft(config: EngineConfig) -> bool:
    """By the flag, or forced by grammars."""
    by_grammar = config.grammar_backend == "llguidance" and not _why_not(config)
    return config.speculative_algorithm is not None or by_grammar


def max_drafted(config: EngineConfig) -> int:
    """Requests of a recurrent model whose drafts a step can verify."""
    assert config.max_running_requests is not None, "resolved"
    if not may_draft(config):
        return 0
    most = FORCED_REQUESTS if config.speculative_algorithm is None else config.max_running_requests
    return min(most, config.max_running_requests)
