"""What the --speculative flags mean, and what speculation does not work with."""

from engine.config import EngineConfig
from engine.core.drafting import Drafting
from engine.core.ngram import NgramDrafter
from engine.model_files.model_config import ModelConfig
from service.flags import ConfigError

FLAG = "--speculative-algorithm"
FORCED_ROWS = 8  # of a request whose grammar forces tokens, without the flag


def check_speculation(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError."""
    algorithm = config.speculative_algorithm
    if algorithm is None:
        return
    shortest, longest = config.speculative_ngram_min_match_window_size, config.speculative_ngram_max_match_window_size
    if shortest > longest:
        raise ConfigError(
            f"--speculative-ngram-min-match-window-size {shortest}: must be at most "
            f"--speculative-ngram-max-match-window-size ({longest})"
        )
    if why := _why_not(config, model):
        raise ConfigError(f"{FLAG} {algorithm}: {why}")


def _why_not(config: EngineConfig, model: ModelConfig) -> str:
    """Why a decode step has one token of each request, and the remedy; "": it may have more."""
    if model.recurrent is not None:
        return "a recurrent state cannot go back behind tokens that were guessed wrong; leave it out"
    if config.pp_size > 1:
        return f"--pp-size {config.pp_size} has other tokens in flight; leave it out, or give --tp-size"
    if config.enable_dp_attention:
        return "--enable-dp-attention agrees on steps of one token; leave one of them out"
    return ""


def rows_of_request(config: EngineConfig) -> int:
    """Return the most rows that a request has in a decode step."""
    return FORCED_ROWS if config.speculative_algorithm is None else config.speculative_num_draft_tokens


def drafting_of(config: EngineConfig, model: ModelConfig, *, decodes: bool) -> Drafting | None:
    """Return None where nothing is drafted. Without --speculative-algorithm it is what grammars force. `decodes`: of the worker's role."""
    algorithm = config.speculative_algorithm
    if not decodes or (algorithm is None and (config.grammar_backend != "llguidance" or _why_not(config, model))):
        return None
    most = rows_of_request(config) - 1
    drafter = NgramDrafter(
        shortest_match=config.speculative_ngram_min_match_window_size,
        longest_match=config.speculative_ngram_max_match_window_size,
        most=most,
    )
    return Drafting(None if algorithm is None else drafter, most=most, counts=config.device == "cpu")
