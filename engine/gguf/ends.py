"""EOS tokens of a GGUF file by llama.cpp's rule (llama-vocab.cpp)."""

from collections.abc import Mapping
from typing import Any

from engine.gguf.file import GGUFFile

# EOS texts in any family.
TEXTS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>"}
    | {"<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "<end_of_utterance>"}
    | {"<|return|>", "<|call|>", "<|calls|>", "<|flush|>"}
)
# EOS of fill-in-the-middle: the metadata's, or the first known text.
_OF_FILES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# If all of the first exist, the second is no EOS.
_NO_ENDS = (
    (("<|return|>", "<|call|>"), "<|end|>"),
    (("<|flush|>", "<|calls|>"), "<|end|>"),
    (("<|tool_response>",), "</s>"),
)


def end_ids(file: GGUFFile) -> list[Any]:
    """The ids; those from metadata are unchecked."""
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
