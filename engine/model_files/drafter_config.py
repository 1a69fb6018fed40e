"""Draft model configuration."""

from dataclasses import dataclass
from pathlib import Path

from engine.model_files.families import FAMILIES
from engine.model_files.fields import Fields, read_fields
from engine.model_files.model_config import ModelConfig, load_model_config
from service.flags import ConfigError

STANDALONE, NEXTN, EAGLE, EAGLE3 = "STANDALONE", "NEXTN", "EAGLE", "EAGLE3"
DRAFT_PATH = "--speculative-draft-model-path"
EAGLE_MARKS = ("Eagle3", "Eagle")  # in architecture names of drafters, before the name of a model
FEWEST_LAYERS = 7  # below this, the default layers of EAGLE3 are not three


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """`kind`: see engine/models/draft_model.py. `layers`: its configuration.

    `path`: its checkpoint, empty for the model's. `hidden`: size of the model's hidden states, 0 if
    unused. `inside`: layers whose inputs it reads, empty for the last output. `head_rows`: tokens
    of its own head, 0 without.
    """

    kind: str
    path: str
    layers: ModelConfig
    hidden: int
    inside: tuple[int, ...] = ()
    head_rows: int = 0

    def signature(self) -> str:
        if not self.path:
            return self.kind
        inside = f" of {','.join(map(str, self.inside))}" if self.inside else ""
        return f"{self.kind}{inside} {self.layers.signature()}"


def load_standalone(path: str, model: ModelConfig) -> DrafterConfig:
    """Raises ConfigError."""
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
            f"{flag}: a drafter's own recurrent states cannot go back behind tokens that were guessed wrong; give one without"
        )
    return DrafterConfig(kind=STANDALONE, path=path, layers=layers, hidden=0)


def nextn_of(model: ModelConfig, *, flag: str) -> DrafterConfig:
    """Configure the model's MTP layer; `flag` requested it. Raises ConfigError."""
    if not model.nextn_layers:
        raise ConfigError(
            f"{flag}: the model's config.json has no num_nextn_predict_layers or mtp_num_hidden_layers, so no layer that drafts; leave "
            f"it out, or give EAGLE with {DRAFT_PATH}, or NGRAM"
        )
    return DrafterConfig(kind=NEXTN, path="", layers=model, hidden=model.hidden_size)


def load_eagle(path: str, model: ModelConfig, *, kind: str) -> DrafterConfig:
    """`kind`: EAGLE or EAGLE3. Raises ConfigError."""
    fields, flag = read_fields(Path(path) / "config.json", required=True), f"{DRAFT_PATH} {path}"
    layers = load_model_config(path, architecture=_architecture(fields))
    hidden = fields.count("target_hidden_size", default=layers.hidden_size if kind == EAGLE else model.hidden_size)
    _check_eagle(flag, layers, model, hidden=hidden)
    if kind == EAGLE:
        return DrafterConfig(kind=kind, path=path, layers=layers, hidden=hidden)
    return DrafterConfig(
        kind=kind,
        path=path,
        layers=layers,
        hidden=hidden,
        inside=_inside(fields, model),
        head_rows=fields.count("draft_vocab_size", default=layers.vocab_size),
    )


def _architecture(fields: Fields) -> str:
    name = fields.architecture()
    for mark in EAGLE_MARKS:
        name = name.replace(mark, "")
    if name not in FAMILIES or FAMILIES[name].experts is not None:
        raise fields.error(
            "architectures",
            f"{fields.get('architectures')!r} is not supported for a drafter; such as LlamaForCausalLMEagle3 is",
        )
    return name


def _check_eagle(flag: str, layers: ModelConfig, model: ModelConfig, *, hidden: int) -> None:
    for name, own, theirs in (
        ("hidden_size", layers.hidden_size, model.hidden_size),
        ("target_hidden_size", hidden, model.hidden_size),
        ("vocab_size", layers.vocab_size, model.vocab_size),
    ):
        if own != theirs:
            raise ConfigError(f"{flag}: {name} is {own}, the model's {theirs}; give a drafter that is trained for it")
    if layers.num_layers != 1:
        raise ConfigError(f"{flag}: num_hidden_layers is {layers.num_layers}; drafters of one layer are supported")


def _inside(fields: Fields, model: ModelConfig) -> tuple[int, ...]:
    """Layers after the named ones, whose outputs they read."""
    count = model.num_layers
    if count < 2:
        raise fields.error("eagle_config", "needs a model of at least two layers: EAGLE3 reads the layers inside")
    named = fields.inside("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    if named is None:
        if count < FEWEST_LAYERS:
            raise fields.error(
                "eagle_config", f"must name eagle_aux_hidden_state_layer_ids: the model has {count} layers"
            )
        return 2, count // 2, count - 3
    are_layers = isinstance(named, list) and all(isinstance(i, int) and 0 <= i < count - 1 for i in named)
    if not named or not are_layers or len({*named}) < len(named):
        raise fields.error(
            "eagle_aux_hidden_state_layer_ids",
            f"must be different layers of the model, 0 to {count - 2}, got {named!r}",
        )
    return tuple(layer + 1 for layer in named)
