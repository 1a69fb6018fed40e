"""Tokenizer and chat template as checkpoints bring them."""

import json
from pathlib import Path

import pytest

from engine.frontend.served_model import load_sampling_defaults
from engine.text.chat_template import ChatTemplate, TemplateRefused, load_chat_template
from engine.text.tokenizer import Tokenizer, load_tokenizer
from service.flags import ConfigError
from tests.frontend.conftest import byte_tokenizer, write_checkpoint

HELLO = [{"role": "user", "content": "hi <b> é"}]


def rewritten(folder: Path, config: object) -> Path:
    path = write_checkpoint(folder)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_bos_follows_the_post_processor_unless_the_config_decides(tmp_path: Path) -> None:
    for config, num_bos in (
        ({}, 1),
        ({"add_bos_token": False, "bos_token": "<s>"}, 0),
        ({"add_bos_token": True, "bos_token": {"content": "<s>"}}, 1),
    ):
        assert load_tokenizer(rewritten(tmp_path, config)).encode("a").count(256) == num_bos
    plain = Tokenizer(byte_tokenizer().backend, config={"add_bos_token": True, "bos_token": "<s>"})
    assert plain.encode("a", add_special_tokens=False)[0] != 256


def test_a_lone_surrogate_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="Unicode"):
        byte_tokenizer().encode("\ud800")


def test_where_templates_are_found(tmp_path: Path) -> None:
    def found(config: dict[str, object]) -> str | None:
        template = load_chat_template(tmp_path, config=config, special_tokens={"bos_token": "<s>"})
        return template.render(HELLO) if template else None

    assert found({}) is None
    assert found({"chat_template": "{{ bos_token }}plain"}) == "<s>plain"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert found({"chat_template": named}) == "D"
    assert found({"chat_template": named[:1]}) == "T"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert found({"chat_template": "plain"}) == "file"


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


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0]['x']['y'] }}",
        "{{ range(10**9) }}",
    ],
)
def test_refusals_and_escapes_are_refused(source: str) -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate" if "roles" in source else "refused the messages"):
        ChatTemplate(source).render(HELLO)


def test_sampling_defaults_of_a_checkpoint(tmp_path: Path) -> None:
    assert load_sampling_defaults(str(tmp_path), vocab_size=10) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 0, "top_p": 0.95, "eos_token_id": [1, 2], "do_sample": true}')
    assert load_sampling_defaults(str(tmp_path), vocab_size=10) == {"temperature": 0.6, "top_k": -1, "top_p": 0.95}
    file.write_text('{"top_p": 7}')
    with pytest.raises(ConfigError, match="top_p"):
        load_sampling_defaults(str(tmp_path), vocab_size=10)
