"""--skip-tokenizer-init and other flags."""

from engine.config import EngineConfig
from service.flags import ConfigError

FLAG = "--skip-tokenizer-init"


def check_tokenizer_flags(config: EngineConfig) -> None:
    """Raises ConfigError for flags that need the tokenizer."""
    if not config.skip_tokenizer_init:
        return
    needing_text = {
        "--tool-call-parser": config.tool_call_parser,
        "--reasoning-parser": config.reasoning_parser,
        "--grammar-backend": None if config.grammar_backend == "none" else config.grammar_backend,
        "--constrained-json-disable-any-whitespace": config.constrained_json_disable_any_whitespace,
    }
    for name, value in needing_text.items():
        if value:
            shown = name if value is True else f"{name} {value}"
            raise ConfigError(f"{shown}: needs the tokenizer that {FLAG} leaves out; leave one of them out")


def grammar_backend(config: EngineConfig) -> str:
    """The default needs a tokenizer."""
    return config.grammar_backend or ("none" if config.skip_tokenizer_init else "llguidance")
