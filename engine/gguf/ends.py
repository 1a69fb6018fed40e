"""The tokens of a GGUF file that end an answer, by llama.cpp's rule for its end-of-generation tokens (llama-vocab.cpp)."""

from collections.abc import Mapping
from typing import Any

from engine.gguf.file import GGUFFile

# Texts of ends in some family, whatever the metadata says of them.
TEXTS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>"}
    | {"<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "<end_of_utterance>"}
    | {"<|return|>", "<|call|>", "<|calls|>", "<|flush|>"}
)
# Ends of files that a model fills in: the metadata names one of each kind, or the first text that is there counts.
_OF_FILES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Where all of the first are there, the second ends a part of an answer, or nothing.
_NO_ENDS = (
    (("<|return|>", "<|call|>"), "<|end|>"),
    (("<|flush|>", "<|calls|>"), "<|end|>"),
    (("<|tool_response>",), "</s>"),
)


def end_ids(file: GGUFFile) -> list[Any]:
    """The ids, unchecked where the metadata has them."""
    ids = {token: index for index, token in enumerate(file.values("tokenizer.ggml.tokens", str))}
    named = [_named(file, kind) for kind in ("eos", "eot", "eom")]
    named += [_of_files(file, kind, ids) for kind in _OF_FILES]
    no_ends = {text for needed, text in _NO_ENDS if all(one in ids for one in needed)}
    return [*(id for id in named if id is not None), *(ids[text] for text in sorted(TEXTS - no_ends) if text in ids)]


def _named(file: GGUFFile, kind: str) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{kind}_token_id")


def _of_files(file: GGUFFile, kind: str, ids: Mapping[str, int]) -> Any:
    found = _named(file, kind)
    return next((ids[text] for text in _OF_FILES[kind] if text in ids), None) if found is None else found
