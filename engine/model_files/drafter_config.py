"""The configuration of a drafter, from its checkpoint or the model's own. Never torch."""

from dataclasses import dataclass

from engine.model_files.model_config import ModelConfig, load_model_config
from service.flags import ConfigError

STANDALONE, NEXTN, EAGLE, EAGLE3 = "STANDALONE", "NEXTN", "EAGLE", "EAGLE3"
DRAFT_PATH = "--speculative-draft-model-path"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """`kind`: as engine/models/draft_model.py names it. `path`: its checkpoint; "": it is in the model's. `layers`: describes them.

    `hidden`: size of the hidden states of the model that it reads; 0: none.
    """

    kind: str
    path: str
    layers: ModelConfig
    hidden: int

    def signature(self) -> str:
        """What prefill and decode must agree on."""
        return f"{self.kind} {self.layers.signature()}"


def load_standalone(path: str, model: ModelConfig) -> DrafterConfig:
    """A model of its own, which drafts for `model`. Raises ConfigError."""
    layers = load_model_config(path)
    flag = f"{DRAFT_PATH} {path}"
    if not layers.generates:
        raise ConfigError(f"{flag}: it generates no tokens; give a model that does")
    if layers.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{flag}: its vocabulary has {layers.vocab_size} tokens, the model's {model.vocab_size}; give a model of the same "
            "tokenizer"
        )
    if layers.recurrent is not None:
        raise ConfigError(
            f"{flag}: its recurrent states cannot go back behind tokens that were guessed wrong; give another"
        )
    return DrafterConfig(kind=STANDALONE, path=path, layers=layers, hidden=0)
