"""GGUF tokenizers for the `tokenizers` library, and their tokenizer_config.json.

"gpt2" is byte-level BPE (`pre`: pre-tokenizer), "llama" is SentencePiece BPE with byte fallback.
Ids equal those of llama.cpp and transformers.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from engine.gguf.file import TEXTS, GGUFFile
from service.flags import ConfigError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_TEMPLATE = "tokenizer.chat_template"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# tokenizer.ggml.pre -> pre-tokenizer of its tokenizer.json.
_GPT2_NAMES = ("default", "gpt-2")
_SMOLLM_NAMES = ("smollm",)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
_SPLITS = {**dict.fromkeys(_LLAMA3_NAMES, _LLAMA3), **dict.fromkeys(_QWEN2_NAMES, _QWEN2)}
PRE_TOKENIZERS = (*_GPT2_NAMES, *_SMOLLM_NAMES, *_LLAMA3_NAMES, *_QWEN2_NAMES)


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises ConfigError."""
    kind = file.value("tokenizer.ggml.model", str, "")
    tokens = file.values("tokenizer.ggml.tokens", str)
    if not kind or not tokens:
        raise file.error("has no tokenizer in its metadata (tokenizer.ggml.*); take a file that was converted with one")
    if kind not in ("gpt2", "llama"):
        raise file.error(f"tokenizer.ggml.model is {kind!r}, which is not supported; supported: gpt2, llama")
    try:
        backend = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens)
    except ConfigError:
        raise
    except Exception as error:  # tokenizers raises Exception for inconsistent merges
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise file.error(f"its tokenizer cannot be used ({reason}); convert the model again") from None
    _add_tokens(backend, file, tokens)
    return backend


def _byte_level(file: GGUFFile, tokens: tuple[str, ...]) -> Tokenizer:
    pre = file.value("tokenizer.ggml.pre", str, "default")
    if pre not in PRE_TOKENIZERS:
        raise file.error(
            f"tokenizer.ggml.pre is {pre!r}, which is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    model = BPE(vocab=_vocabulary(file, tokens), merges=_merges(file), ignore_merges=pre in _LLAMA3_NAMES)
    backend = Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SMOLLM_NAMES:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2


def _sentencepiece(file: GGUFFile, tokens: tuple[str, ...]) -> Tokenizer:
    vocabulary = _vocabulary(file, tokens)
    unknown = file.value("tokenizer.ggml.unknown_token_id", int, 0)
    merges = _merges(file) if "tokenizer.ggml.merges" in file.metadata else _merges_by_score(file, tokens, vocabulary)
    model = BPE(vocab=vocabulary, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    prefix = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", "▁")
    # Each text between special tokens gets a space, even a second one (as in llama.cpp and Llama
    # 2).
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(content=" ", left=1)] if prefix else parts)
    return backend


def _vocabulary(file: GGUFFile, tokens: tuple[str, ...]) -> dict[str, int]:
    kinds = file.values("tokenizer.ggml.token_type", int)
    unused = {index for index, kind in enumerate(kinds) if kind == _UNUSED}
    return {token: index for index, token in enumerate(tokens) if index not in unused}


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    merges = file.values("tokenizer.ggml.merges", str)
    if not merges:
        raise file.error("metadata tokenizer.ggml.merges is missing; convert the model again")
    pairs = [merge.partition(" ") for merge in merges]
    return [(left, right) for left, _, right in pairs]


def _merges_by_score(file: GGUFFile, tokens: tuple[str, ...], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    scores = file.values("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise file.error("metadata tokenizer.ggml.scores must have a score for each token; convert the model again")
    merges = []
    for index, token in enumerate(tokens):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(scores[index], left, right) for left, right in known]
    merges.sort(key=lambda merge: merge[0], reverse=True)
    return [(left, right) for _, left, right in merges]


def _add_tokens(backend: Tokenizer, file: GGUFFile, tokens: tuple[str, ...]) -> None:
    """Control, unknown and EOS tokens are special; user-defined ones only stay whole."""
    kinds = dict(zip(tokens, file.values("tokenizer.ggml.token_type", int), strict=False))
    special = [token for token, kind in kinds.items() if token and (kind in (_CONTROL, _UNKNOWN) or token in TEXTS)]
    whole = [token for token, kind in kinds.items() if token and kind == _USER_DEFINED and token not in TEXTS]
    for found, is_special in ((special, True), (whole, False)):
        backend.add_tokens([AddedToken(token, normalized=False, special=is_special) for token in found])


def gguf_tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """The equivalent of tokenizer_config.json, with `chat_template`."""
    adds_bos = file.value("tokenizer.ggml.model", str, "") == "llama"
    adds_bos = adds_bos or file.value("tokenizer.ggml.pre", str, "") in _LLAMA3_NAMES
    config: dict[str, Any] = {
        "add_bos_token": file.value("tokenizer.ggml.add_bos_token", bool, adds_bos),
        "add_eos_token": file.value("tokenizer.ggml.add_eos_token", bool, False),
    }
    if templates := _templates(file):
        config["chat_template"] = templates
    tokens = file.values("tokenizer.ggml.tokens", str)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = file.value(f"tokenizer.ggml.{key}_token_id", int, -1)
        if 0 <= index < len(tokens):
            config[f"{name}_token"] = tokens[index]
    return config


def _templates(file: GGUFFile) -> str | list[dict[str, str]]:
    default = file.value(_TEMPLATE, str, "")
    keys = [key for key in file.metadata if key.startswith(f"{_TEMPLATE}.")]
    named = [
        {"name": key.removeprefix(f"{_TEMPLATE}."), "template": template}
        for key in keys
        if (template := file.value(key, str, ""))
    ]
    return [*([{"name": "default", "template": default}] if default else []), *named] if named else default
