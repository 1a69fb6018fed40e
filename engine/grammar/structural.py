"""Structural tags to a Lark grammar: triggers in free text force what follows. Pure.

SGLang's JSON: {"triggers": ["<f"], "structures": [{"begin": "<f=a>", "schema": {...}, "end":
"</f>"}]}. The grammar (lazy text to a trigger, rest of `begin`, schema, `end`) follows llguidance's
`StructTag`.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from engine.sampling_params import GrammarInvalid

HEAD = """%llguidance {}
start: (TAGS)* tag_end
tag_end: TAG_TEXT
TAG_TEXT: /(.|\\n)*/
"""


class Structure(msgspec.Struct, kw_only=True):
    """A structure of a structural tag.

    `schema`: between `begin` and `end`. `after_number`: follows an integer after `begin`.
    """

    begin: str
    after_number: str = ""
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


def structural_lark(
    source: str, *, special_tokens: Mapping[str, int], schema_of: Callable[[Any], Any] = lambda schema: schema
) -> str:
    """The structural tag as a Lark grammar.

    `special_tokens`: ids by name. `schema_of`: transforms schemas. Raises GrammarInvalid.
    """
    tag = read_structural_tag(source)
    names = [f"tag_{i}" for i in range(len(tag.structures))]
    rules = [
        _rule(name, structure, tag.triggers, special_tokens, schema=schema_of(structure.schema))
        for name, structure in zip(names, tag.structures, strict=True)
    ]
    return HEAD.replace("TAGS", " | ".join(names), 1) + "\n".join(rules)


def _rule(
    name: str, structure: Structure, triggers: list[str], special_tokens: Mapping[str, int], *, schema: Any
) -> str:
    trigger = max((t for t in triggers if structure.begin.startswith(t)), key=len)
    rest = structure.begin[len(trigger) :]
    number = f"/[0-9]+/ {_text(structure.after_number, special_tokens)}" if structure.after_number else ""
    end = _text(structure.end, special_tokens)
    body = f"{_text(rest, special_tokens)} {number} %json {json.dumps(schema)} {end}"
    if trigger in special_tokens:
        return f"{name}: TAG_TEXT {_text(trigger, special_tokens)} {body}\n"
    return f"{name}_trigger[lazy]: TAG_TEXT {_text(trigger, {})}\n{name}: {name}_trigger {body}\n"


def _text(text: str, special_tokens: Mapping[str, int]) -> str:
    pieces = _pieces(text, special_tokens)
    return " ".join(f"<[{special_tokens[token]}]>" if token else json.dumps(plain) for token, plain in pieces)


def _pieces(text: str, special_tokens: Collection[str]) -> list[tuple[str, str]]:
    names = [re.escape(name) for name in sorted(special_tokens, key=len, reverse=True) if name in text]
    if not names:
        return [("", text)] if text else []
    parts = re.split(f"({'|'.join(names)})", text)
    return [(part, "") if i % 2 else ("", part) for i, part in enumerate(parts) if part]
