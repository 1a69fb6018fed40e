"""Counts tokens that the server does not report, by the model's tokenizer.

Needs the package `tokenizers`, and only with --tokenizer.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from deploy.bench.config import TargetFlags
from service.flags import ConfigError

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

# Where a number of tokens comes from.
USAGE, META_INFO, TOKEN_IDS = "usage", "meta_info", "token ids"  # of the server
TOKENIZER, WORDS, EVENTS, UNKNOWN = "tokenizer", "words", "text events", "not counted"


class TokenCounter:
    def __init__(self, tokenizer: "Tokenizer | None" = None) -> None:
        self._tokenizer = tokenizer

    def __bool__(self) -> bool:
        return self._tokenizer is not None

    def count(self, text: str, *, special: bool = False) -> int:
        """`special`: with those that begin and end a prompt."""
        assert self._tokenizer is not None, "there is no tokenizer"
        return len(self._tokenizer.encode(text, add_special_tokens=special))


def token_counter(config: TargetFlags) -> TokenCounter:
    """Load --tokenizer, else that of a directory --model. Raises ConfigError."""
    given = config.tokenizer
    if given is None:
        given = config.model if config.model is not None and Path(config.model).is_dir() else None
        if given is None or not (Path(given) / "tokenizer.json").is_file():
            return TokenCounter()
    try:
        return TokenCounter(_load(given))
    except ImportError:
        raise ConfigError("--tokenizer: needs the package tokenizers; pip install 'tandem-serve[engine]'") from None


def _load(given: str) -> "Tokenizer":
    from engine.model_files.hub import SMOLLM2, download, is_model_id, smollm2_file
    from engine.text.tokenizer import load_tokenizer

    path = Path(given)
    if not path.exists():
        if given == SMOLLM2:
            path = smollm2_file()
        elif is_model_id(given):
            path = Path(download(given, None, option="--tokenizer", weights=False))
        else:
            raise ConfigError(f"--tokenizer {given}: no such directory or file; give one with a tokenizer.json")
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        raise ConfigError(f"--tokenizer {given}: has no tokenizer.json; give a directory that has one, or a .gguf file")
    return load_tokenizer(path)
