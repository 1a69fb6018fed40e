"""What folders after real checkpoints say, against transformers: ids of prompts, chats with and without tools, ends, contexts."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.model_files.directory import open_directory
from engine.model_files.model_config import load_model_config
from engine.text.chat_template import load_chat_template
from engine.text.tokenizer import load_tokenizer
from tests.models.files.folder_shapes import SHAPES, Shape, write_folder

TEXTS = ("hello world", " the tool", "x\nhello  user é 鬱 7", "")
TALK = [{"role": "user", "content": "hello <b> world"}, {"role": "assistant", "content": "the tool"}]
TALK += [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_folder_says_what_it_says_to_transformers(shape: Shape, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    ids = write_folder(folder, shape)
    ours = load_tokenizer(folder)
    theirs = (PreTrainedTokenizerFast if shape.generic else AutoTokenizer).from_pretrained(folder)
    before, behind = [ids[text] for text in shape.before], [ids[text] for text in shape.behind]
    between = [f"hello{token}world {token}\nuser" for token in (*shape.special, *shape.plain)]
    for text in (*TEXTS, *between):
        assert ours.encode(text) == [*before, *theirs.encode(text), *behind], repr(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), repr(text)
    for tools in (None, TOOLS):
        if not open_directory(folder).templates:
            continue
        template = load_chat_template(folder, special_tokens=ours.special_tokens, tools=tools is not None)
        assert template is not None
        prompt = template.render(TALK, extra={"tools": tools})
        given = {"tokenize": False, "add_generation_prompt": True, "chat_template": processors_template(shape, tools)}
        assert prompt == theirs.apply_chat_template(TALK, tools=tools, **given)
    config = load_model_config(folder)
    assert set(config.eos_token_ids) == their_ends(folder, theirs) | {ids[text] for text in shape.unnamed}
    assert config.max_position_embeddings == shape.context
    padding = range(config.vocab_size - shape.padding, config.vocab_size)
    assert all(ours.decode([id]) == ours.token_text(id) == "" for id in padding)


def processors_template(shape: Shape, tools: list[Any] | None) -> str | None:
    """Where a processor has a template in the old file: vLLM takes the tokenizer's for tools. None: the tokenizer's."""
    if "chat_template.jinja" in shape.files or (tools and "chat_template" in shape.tokenizer):
        return None
    return shape.files.get("chat_template.json", {}).get("chat_template")


def their_ends(folder: Path, tokenizer: Any) -> set[int]:
    found = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            named = json.loads((folder / name).read_text()).get("eos_token_id")
            found |= set(named if isinstance(named, list) else [] if named is None else [named])
    return found
