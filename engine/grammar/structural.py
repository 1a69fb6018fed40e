"""Structural tags to a Lark grammar: free text in which certain beginnings force what follows. Pure.

The JSON is SGLang's: {"triggers": ["<f"], "structures": [{"begin": "<f=a>", "schema": {...}, "end": "</f>"}]}. The grammar
(lazy text up to a trigger, then the rest of `begin`, the schema, `end`) follows llguidance's `StructTag`.
"""

import json
from collections.abc import Collection
from typing import Any

import msgspec

from engine.grammar.compiler import GrammarInvalid

HEAD = """%llguidance {}
start: (TAGS)* tag_end
tag_end: TAG_TEXT
TAG_TEXT: /(.|\\n)*/
"""


class Structure(msgspec.Struct, kw_only=True):
    """`schema`: of the JSON between `begin` and `end`."""

    begin: str
    schema: dict[str, Any] | bool = {}
    end: str = ""


class StructuralTag(msgspec.Struct, kw_only=True):
    structures: list[Structure]
    triggers: list[str]


def read_structural_tag(source: str) -> StructuralTag:
    """Raises GrammarInvalid."""
    try:
        tag = msgspec.json.decode(source, type=StructuralTag)
    except msgspec.MsgspecError as error:
        raise GrammarInvalid(str(error)) from None
    if not tag.structures or not all(tag.triggers):
        raise GrammarInvalid("structures must not be empty, nor may a trigger")
    for structure in tag.structures:
        if not any(map(structure.begin.startswith, tag.triggers)):
            raise GrammarInvalid(f"no trigger begins {structure.begin!r}")
    return tag


def structural_lark(source: str, *, special_tokens: Collection[str]) -> str:
    """The Lark grammar. A trigger that is a special token stands for that token. Raises GrammarInvalid."""
    tag = read_structural_tag(source)
    names = [f"tag_{i}" for i in range(len(tag.structures))]
    rules = [_rule(n, s, tag.triggers, special_tokens) for n, s in zip(names, tag.structures, strict=True)]
    return HEAD.replace("TAGS", " | ".join(names), 1) + "\n".join(rules)


def _rule(name: str, structure: Structure, triggers: list[str], special_tokens: Collection[str]) -> str:
    trigger = max((t for t in triggers if structure.begin.startswith(t)), key=len)
    rest, schema = structure.begin[len(trigger) :], json.dumps(structure.schema)
    body = f"{_text(rest)} %json {schema} {_text(structure.end)}"
    if trigger in special_tokens and trigger.startswith("<") and trigger.endswith(">"):
        return f"{name}: TAG_TEXT {trigger} {body}\n"
    return f"{name}_trigger[lazy]: TAG_TEXT {_text(trigger)}\n{name}: {name}_trigger {body}\n"


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
