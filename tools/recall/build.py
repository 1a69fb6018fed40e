"""Writes a checkpoint, the same on every machine to the bit: `python -m tools.recall.build recall|recall-wide|recall-hybrid OUT_DIR`.

`recall` and `recall-wide` are shipped; tests build the hybrid, whose MTP layer drafts for it.
"""

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from tools.recall import hybrid, parts, vocab, weights, wide

MODELS: dict[str, ModuleType] = {"recall": weights, "recall-wide": wide, "recall-hybrid": hybrid}
OWN_FIELDS: dict[str, dict[str, Any]] = {"recall-hybrid": hybrid.FIELDS}  # of config.json
MAX_POSITION = 32768

# A chat is a list of facts: only keys and values count ("What is k3?" -> k03). <eos> ends each fact, so that replaying one
# ends the answer.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text()


def build(name: str, out_dir: Path) -> None:
    """`name`: one of MODELS."""
    out_dir.mkdir(parents=True, exist_ok=True)
    model = MODELS[name]
    save_file(model.build_weights(), out_dir / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(out_dir / "tokenizer.json"))
    _write_json(out_dir / "config.json", _config(model) | OWN_FIELDS.get(name, {}))
    _write_json(out_dir / "generation_config.json", _generation_config())
    _write_json(out_dir / "tokenizer_config.json", _tokenizer_config())


def _config(model: ModuleType) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab.VOCAB_SIZE,
        "hidden_size": model.HIDDEN,
        "intermediate_size": parts.INTERMEDIATE,
        "num_hidden_layers": model.NUM_LAYERS,
        "num_attention_heads": model.NUM_HEADS,
        "num_key_value_heads": model.NUM_KV_HEADS,
        "head_dim": parts.HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": parts.NORM_EPS,
        "rope_theta": parts.ROPE_THETA,
        "max_position_embeddings": MAX_POSITION,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "pad_token_id": vocab.PAD,
        "bos_token_id": vocab.BOS,
        "eos_token_id": vocab.EOS,
    }


def _generation_config() -> dict[str, Any]:
    return {"bos_token_id": vocab.BOS, "eos_token_id": vocab.EOS, "pad_token_id": vocab.PAD}


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocab.WORDS[vocab.BOS],
        "eos_token": vocab.WORDS[vocab.EOS],
        "pad_token": vocab.WORDS[vocab.PAD],
        "unk_token": vocab.WORDS[vocab.UNK],
        "model_max_length": MAX_POSITION,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _tokenizer() -> Tokenizer:
    """Splits words at white space, joins them by spaces, and adds <bos>."""
    ids = {word: i for i, word in enumerate(vocab.WORDS)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=vocab.WORDS[vocab.UNK]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    bos = vocab.WORDS[vocab.BOS]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocab.BOS)]
    )
    tokenizer.add_special_tokens([AddedToken(vocab.WORDS[i], special=True) for i in sorted(vocab.HIDDEN_IN_TEXT)])
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a checkpoint that ships with Tandem.")
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("out_dir", type=Path, help="directory to write it to")
    given = parser.parse_args()
    build(given.name, given.out_dir)
    print(f"wrote {given.out_dir}")


if __name__ == "__main__":
    main()
