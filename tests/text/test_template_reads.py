"""What a template reads of messages, found in its syntax tree."""

import pytest

from engine.text.chat_template import CallArguments, ChatTemplate, Parts, TextPart
from engine.text.template_reads import TemplateReads
from tests.text.chat_templates import SHAPES

FLAGS = ("parts", "strings", "null", "calls_beside_null", "one_call", "short_ids")


def reads_of(source: str) -> TemplateReads:
    return ChatTemplate(source).reads


@pytest.mark.parametrize("name", SHAPES)
def test_what_templates_of_checkpoints_read(name: str) -> None:
    reads = reads_of(SHAPES[name].source)
    assert {flag for flag in FLAGS if getattr(reads, flag)} == SHAPES[name].reads


LOOP = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
GUARDED = "{% for m in messages %}{% if CHECK %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "parts", "strings"),
    [
        (LOOP, True, False),
        (GUARDED.replace("CHECK", "m.content is string"), True, True),
        (GUARDED.replace("CHECK", "m.role == 'tool' or m.content is string"), True, True),
        (GUARDED.replace("CHECK", "m.content is string and m.content"), True, True),
        (GUARDED.replace("CHECK", "m.content is defined and m.content is not none and m.content is string"), True, True),
        (GUARDED.replace("CHECK", "m.role == 'tool' and m.content is string"), True, False),
        (GUARDED.replace("CHECK", "m.content is string and 'x' in m.content"), True, False),
        ("{% for m in messages %}{% for p in m.content %}{{ '<' + p + '>' }}{% endfor %}{% endfor %}", True, False),
        (GUARDED.replace("CHECK", "m.content is not string"), True, True),
        (GUARDED.replace("CHECK", "m.role is string"), True, False),
        (GUARDED.replace("CHECK", "m.content is defined"), True, False),
        ("{% if messages[0].content is string %}x{% endif %}" + LOOP, True, False),
        ("{% for p in messages %}{{ p.text }}{% endfor %}", False, True),
        ("{% for m in messages %}{% for p in m.parts %}{{ p.text }}{% endfor %}{% endfor %}", False, True),
        ("{% for m in messages %}{% for p in m.content %}{{ p.type }}{% endfor %}{{ m.content }}{% endfor %}", False, True),
        ("{% for m in messages[:-1] + [messages[-1]] %}{{ (m.content | first).text }}{% endfor %}", True, False),
        ("{% set a = messages %}{% set b = a[1:] %}{% for c in b %}{% set d = c %}{% for e in d['content'] %}{{ e['text'] }}{% endfor %}{% endfor %}", True, False),
        ("{% set last = messages | last %}{% for p in (last.content or []) %}{{ p.text }}{% endfor %}", True, False),
        ("{% for m in messages %}{% with c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}{% endwith %}{% endfor %}", True, False),
        ("{% for m in messages %}{% set r, c = m.role, m.content %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}", True, False),
        ("{% macro w(a, c=messages[0].content) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}{{ w(1) }}", True, False),
        ("{{ 'text' }}{{ nothing.content[0].text }}", False, True),
        ("no messages", False, True),
    ],
)  # fmt: skip
def test_contents_by_any_name(source: str, parts: bool, strings: bool) -> None:
    reads = reads_of(source)
    assert (reads.parts, reads.strings) == (parts, strings)


def test_null_short_ids_single_calls_and_names() -> None:
    assert reads_of("{{ messages[0].content == none }}").null
    assert not reads_of("{{ messages[0].tool_calls is none }}").null
    assert reads_of("{% for m in messages %}{{ m.tool_call_id | length == 9 }}{% endfor %}").short_ids
    assert not reads_of("{{ messages | length == 9 }}{{ messages[0].tool_call_id | length == 8 }}").short_ids
    assert reads_of("{{ messages[0].tool_calls[0].id }}").one_call
    loop = "{% for c in messages[0].tool_calls %}{{ c.id }}{{ messages[0].tool_calls[0] }}{% endfor %}"
    assert not reads_of(loop).one_call
    named = "{{ messages[0].prefix }}{% if 'tools' in messages[0] %}{{ messages[0]['weight'] }}{% endif %}"
    names = reads_of(named).names
    assert {"prefix", "tools", "weight"} <= names and "odd" not in names


def test_calls_beside_null_alone() -> None:
    calls = "{% for c in m.tool_calls %}{{ c }}{% endfor %}"
    shown = "{% for m in messages %}{% if CHECK %}A{% else %}B{% endif %}{% endfor %}"
    assert reads_of(shown.replace("CHECK", "m.content is none").replace("A", calls)).calls_beside_null
    assert not reads_of(shown.replace("CHECK", "m.content is none").replace("B", calls)).calls_beside_null
    assert not reads_of(shown.replace("CHECK", "m.content != none").replace("A", calls)).calls_beside_null


def test_parts_where_a_template_knows_texts() -> None:
    parts = Parts([TextPart("a b"), TextPart("c"), {"type": "image"}])
    assert (f"{parts}", "x" + parts, parts + "x") == ("a b\nc", "xa b\nc", "a b\ncx")
    assert parts.split() == ["a", "b", "c"] and "b\nc" in parts and {"type": "image"} in parts and "z" not in parts
    assert Parts.of_text("a") == [{"type": "text", "text": "a"}]
    content = "messages[0].content"
    shown = ChatTemplate(f"{{{{ {content} | trim }}}}|{{{{ {content} | tojson }}}}|{{{{ {content} ~ 1 }}}}")
    assert shown.render([{"content": Parts.of_text(" a ")}]) == 'a|[{"type": "text", "text": " a "}]| a 1'
    with pytest.raises(TypeError):
        parts + 5


@pytest.mark.parametrize(
    ("given", "value", "text"),
    [
        ('{"a":1}', {"a": 1}, '{"a":1}'),
        ({"a": "é"}, {"a": "é"}, '{"a": "é"}'),
        (None, {}, "{}"),
        ("", {}, "{}"),
        ('{"a": ', {}, '{"a": '),
        ("[1]", {}, "[1]"),
    ],
)
def test_arguments_are_an_object_and_a_text(given: object, value: object, text: str) -> None:
    arguments = CallArguments.of(given)
    assert arguments == value and str(arguments) == text and "x" + arguments == "x" + text
    source = "{{ a is mapping }}{{ a is string }}{% for k, v in a | items %}{{ k }}{% endfor %}{{ a | tojson }}{{ a }}"
    shown = ChatTemplate(source).render([], extra={"a": arguments})
    assert shown.startswith("TrueFalse" + "".join(arguments)) and shown.endswith(text)
