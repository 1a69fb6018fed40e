"""Tokenizer and chat template as checkpoints bring them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from engine.frontend.served_model import load_sampling_defaults
from engine.model_files.directory import open_directory
from engine.text.chat_template import ChatTemplate, TemplateRefused, load_chat_template
from engine.text.tokenizer import Tokenizer, load_tokenizer
from service.flags import ConfigError
from tests.frontend.conftest import byte_tokenizer, write_checkpoint

CAUSAL, LLAMA = "LlamaForCausalLM", "LlamaTokenizer"
HELLO = [{"role": "user", "content": "hi <b> é"}]


@pytest.mark.parametrize(
    ("post", "config", "architecture", "ids"),
    [
        ("<s> $A", {}, CAUSAL, "<s> a"),
        ("<s> $A", {"add_bos_token": False, "tokenizer_class": LLAMA}, CAUSAL, "<s> a"),
        ("$A </s>", {"add_bos_token": False}, CAUSAL, "a </s>"),
        ("<s> $A </s>", {"add_bos_token": False, "add_eos_token": False}, CAUSAL, "<s> a </s>"),
        ("", {"add_bos_token": True, "tokenizer_class": LLAMA}, CAUSAL, "<s> a"),
        ("", {"tokenizer_class": f"{LLAMA}Fast"}, CAUSAL, "<s> a"),
        ("", {"add_bos_token": False, "tokenizer_class": LLAMA}, CAUSAL, "a"),
        ("", {"add_bos_token": True, "tokenizer_class": "Qwen2Tokenizer"}, CAUSAL, "a"),
        ("$A </s>", {"add_bos_token": True, "tokenizer_class": "GemmaTokenizer"}, CAUSAL, "<s> a </s>"),
        ("<s> $A", {"add_eos_token": True, "tokenizer_class": LLAMA}, "LlamaModel", "<s> a </s>"),
        ("<s> $A", {"add_eos_token": True, "tokenizer_class": LLAMA}, CAUSAL, "<s> a"),
        ("<s> $A </s>", {"add_eos_token": True, "tokenizer_class": LLAMA}, "LlamaModel", "<s> a </s>"),
    ],
)
def test_what_is_added_before_and_behind(
    post: str, config: dict[str, Any], architecture: str, ids: str, tmp_path: Path
) -> None:
    """The template of tokenizer.json stays; flags add what it has not, of the classes that read them, and an end to embeddings alone."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.add_special_tokens(["<s>", "</s>"])
    if post:
        backend.post_processor = processors.TemplateProcessing(single=post, special_tokens=[("<s>", 1), ("</s>", 2)])
    backend.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**names, **config}))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a") == [vocab[token] for token in ids.split()]
    assert tokenizer.encode("a", add_special_tokens=False) == [3]


@pytest.mark.parametrize(
    ("single", "pair"),
    [
        ("$A", "$A $B"),
        ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
        ("$A </s>", "$A </s> $B </s>"),
        ("<s> $A", "$A <s> $B"),
    ],
)
def test_a_pair_has_the_tokens_of_the_template_for_pairs(single: str, pair: str) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "q": 2, "t": 3}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    special = [("<s>", 0), ("</s>", 1)]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    before, between, behind = Tokenizer(backend).pair_marks
    assert [*before, 2, *between, 3, *behind] == backend.encode("q", "t").ids


def test_tokens_that_only_the_config_names_stay_whole(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    size = load_tokenizer(path).backend.get_vocab_size()
    added = {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    config = {"added_tokens_decoder": {str(size): added}, "eos_token": "<new>", "extra_special_tokens": ["a", "none"]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("<new>b", add_special_tokens=False)[0] == size
    assert tokenizer.is_special("a") and tokenizer.is_special("<new>") and not tokenizer.is_special("none")
    assert open_directory(path).end_ids == (size,)


def test_a_vocabulary_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    (tmp_path / "tokenizer.json").write_bytes(b'{"model": {"vocab": {"\xff": 1}}}')
    assert open_directory(tmp_path).end_ids == ()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer that can be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("broken", [[], "x", {"1": 2}, {"x": {}}, {"1": {"content": 3}}])
def test_broken_added_tokens_are_named(broken: object, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": broken or ["x"]}))
    says = r"tokenizer_config\.json: added_tokens_decoder: must have tokens by id; download"
    with pytest.raises(ConfigError, match=says):
        load_tokenizer(path)


def test_a_lone_surrogate_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="Unicode"):
        byte_tokenizer().encode("\ud800")


def test_texts_are_encoded_and_long_lists_decoded_by_calls_that_free_the_interpreter() -> None:
    """As `encode` and `decode` of the library do, which keep it for seconds."""
    own = byte_tokenizer()

    class Watched:
        """The library's tokenizer, without the calls that keep the interpreter."""

        def __getattr__(self, name: str) -> object:
            assert name not in ("encode", "decode"), f"{name} keeps the interpreter"
            return getattr(backend, name)

    backend, watched = own.backend, Tokenizer(own.backend, config=own.config)
    watched.backend = Watched()  # type: ignore[assignment]
    for text in ("", "k17 v42", "é鬱 \n" * 5000, "<s>a<s>"):
        for special in (True, False):
            ids = watched.encode(text, add_special_tokens=special)
            assert ids == backend.encode(text, add_special_tokens=special).ids
    assert watched.decode(ids * 1000) == backend.decode(ids * 1000)


def test_where_templates_are_found(tmp_path: Path) -> None:
    def found(chat_template: object = None, *, tools: bool = False) -> str | None:
        if chat_template is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}))
        template = load_chat_template(tmp_path, special_tokens={"bos_token": "<s>"}, tools=tools)
        return template.render(HELLO) if template else None

    assert found() is None
    assert found("{{ bos_token }}plain") == found(tools=True) == "<s>plain"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert (found(named), found(tools=True)) == ("D", "T")
    assert found({"default": "D", "tool_use": "T"}, tools=True) == "T"
    assert found(named[:1]) == found(tools=True) == "T"
    assert found(7) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "processor"}')
    assert (found(named), found(tools=True)) == ("processor", "T")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert (found(), found(tools=True)) == ("processor", "more")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert (found(), found(tools=True)) == ("file", "more")
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
    assert (found(), found(tools=True)) == ("file", "file")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: cannot be read as UTF-8; download"):
        found()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi <b> é"}]'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ enable_thinking }}{{ tools is none }}{{ add_generation_prompt }}", "FalseTrueTrue"),
        ("{{ messages[0]['nothing'] }}|", "|"),
    ],
)
def test_what_templates_rely_on(source: str, text: str) -> None:
    assert ChatTemplate(source).render(HELLO, extra={"enable_thinking": False, "messages": "not these"}) == text


WRONG = ["raise_exception('roles must alternate')", "messages[0].content + 1", "1 / 0", "messages.append(1)"]
WRONG += ["''.__class__.__mro__[1].__subclasses__()", "messages[0]['x']['y']", "range(10**9)"]


@pytest.mark.parametrize("expression", WRONG)
def test_refusals_and_escapes_are_refused(expression: str) -> None:
    says = "roles must alternate" if "roles" in expression else "refused the messages"
    with pytest.raises(TemplateRefused, match=says):
        ChatTemplate("{{ " + expression + " }}").render(HELLO)


def test_sampling_defaults_of_a_checkpoint(tmp_path: Path) -> None:
    assert load_sampling_defaults(str(tmp_path), vocab_size=10) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 0, "top_p": 0.95, "eos_token_id": [1, 2], "do_sample": true}')
    assert load_sampling_defaults(str(tmp_path), vocab_size=10) == {"temperature": 0.6, "top_k": -1, "top_p": 0.95}
    file.write_text('{"top_p": 7}')
    with pytest.raises(ConfigError, match="top_p"):
        load_sampling_defaults(str(tmp_path), vocab_size=10)
