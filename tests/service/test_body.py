"""Bodies are read strictly: what is wrong is named by its place in the body and in JSON's words, and bounded in time."""

from typing import Any

import msgspec
import pytest
from pydantic import Field

from service.http.body import Body, ClosedBody, optional
from service.http.errors import ApiError, plain, read_body


class Part(Body):
    type: str = Field(description="Its type.", examples=["x"])
    url: str | None = optional("A URL.", "http://x")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="A schema.", examples=[{}])


class Closed(ClosedBody):
    a: int | None = optional("A number.", 1)


class Sample(Body):
    prompt: str | list[str | int | list[int]] = Field(description="A prompt.", examples=["x"])
    parts: str | list[Part] | None = optional("Parts.", "x")
    one: str | Part | None = optional("A part.", "x")
    n: int | None = optional("A number.", 1)
    temperature: float | None = optional("A number.", 0.5)
    stream: bool | None = optional("Whether it streams.", True)
    names: dict[str, str] | None = optional("Names.", {"a": "b"})
    closed: Closed | None = optional("A part without unknown fields.", {"a": 1})
    port: int | None = optional("A port.", 1, ge=1, le=65535)


def error_of(data: bytes | dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_body(data if isinstance(data, bytes) else msgspec.json.encode(data), Sample)
    assert caught.value.status == 400
    return caught.value


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "Object missing required field `prompt`"),
    ({"prompt": 1}, "prompt", "prompt: expected `str | array`, got `int`"),
    ({"prompt": None}, "prompt", "prompt: expected `str | array`, got `null`"),
    ({"prompt": [1, 2.0]}, "prompt[1]", "prompt[1]: expected `int | str | array`, got `float`"),
    ({"prompt": [[1, True]]}, "prompt[0][1]", "prompt[0][1]: expected `int`, got `bool`"),
    ({"prompt": "x", "n": "1"}, "n", "n: expected `int | null`, got `str`"),
    ({"prompt": "x", "n": 1.0}, "n", "n: expected `int | null`, got `float`"),
    ({"prompt": "x", "n": True}, "n", "n: expected `int | null`, got `bool`"),
    ({"prompt": "x", "stream": 1}, "stream", "stream: expected `bool | null`, got `int`"),
    ({"prompt": "x", "temperature": "1"}, "temperature", "temperature: expected `float | null`, got `str`"),
    ({"prompt": "x", "parts": {}}, "parts", "parts: expected `str | array | null`, got `object`"),
    ({"prompt": "x", "parts": [5]}, "parts[0]", "parts[0]: expected `object`, got `int`"),
    ({"prompt": "x", "parts": [{"type": "x"}, {}]}, "parts[1].type", "parts[1].type: object missing required field `type`"),
    ({"prompt": "x", "parts": [{"type": 1}]}, "parts[0].type", "parts[0].type: expected `str`, got `int`"),
    ({"prompt": "x", "parts": [{"type": "x", "schema": 1}]}, "parts[0].schema",
     "parts[0].schema: expected `object | null`, got `int`"),
    ({"prompt": "x", "one": {"type": "x", "str": 1, "Part": 2, "url": 3}}, "one.url",
     "one.url: expected `str | null`, got `int`"),
    ({"prompt": "x", "one": []}, "one", "one: expected `str | object | null`, got `array`"),
    ({"prompt": "x", "names": {"a": 1}}, "names[...]", "names[...]: expected `str`, got `int`"),
    ({"prompt": "x", "closed": {"b": 1}}, "closed.b", "closed.b: is no field that this server knows; leave it out"),
    ({"prompt": "x", "closed": {"b" * 9999: 1}}, f"closed.{'b' * 64}",
     f"closed.{'b' * 64}: is no field that this server knows; leave it out"),
    ({"prompt": "x", "port": 0}, "port", "port: must be greater than or equal to 1"),
    ({"stream": 1, "n": "x", "prompt": 3}, "stream", "stream: expected `bool | null`, got `int`"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field", "message"), WRONG)
def test_the_first_wrong_value_is_named(body: dict[str, Any], field: str, message: str) -> None:
    error = error_of(body)
    assert (error.field, error.message) == (field, message)
    assert error.code == ("unsupported_parameter" if field.startswith("closed.b") else None)


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        (b'{"prompt": "x", "temperature": NaN}', None, "not valid JSON"),
        (b'{"prompt": "x", "temperature": Infinity}', None, "not valid JSON"),
        (b'{"prompt": "x",}', None, "not valid JSON"),
        (b'{"prompt": "x"}x', None, "not valid JSON"),
        (b'{"prompt": "\xff"}', None, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', None, "not valid JSON"),
        (b"", None, "not valid JSON"),
        (b'{"prompt": ' + b"[" * 70 + b"]" * 70 + b"}", None, "nested too deeply"),
        (b"[]", None, "Expected `object`, got `array`"),
        (b"null", None, "Expected `object`, got `null`"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature", "number out of range"),
        (b'{"n": ' + b"9" * 400 + b', "parts": [{"type": -1e999}]}', "parts[0].type", "number out of range"),
        (b'{"n": ' + b"9" * 5000 + b"}", "n", "number out of range"),
        (b'{"n": 1e999, "prompt": \xff', None, "not valid JSON"),
        (b'{"prompt": "x", "temperature": ' + b"9" * 400 + b"}", "temperature", "number out of range"),
    ],
)
def test_text_that_is_not_json_is_refused(text: bytes, field: str | None, says: str) -> None:
    error = error_of(text)
    assert error.field == field and says in error.message


def test_unknown_fields_are_kept_apart() -> None:
    body = read_body(b'{"prompt": "x", "model_extra": 1, "parts": [{"type": "x", "schema_": 2}]}', Sample)
    assert body.model_extra == {"model_extra": 1}
    assert isinstance(body.parts, list) and body.parts[0].model_extra == {"schema_": 2}
    assert plain(body.parts) == [{"type": "x", "url": None, "schema": None}]


def test_a_thousand_wrong_values_are_few_errors() -> None:
    """Pydantic would make an error of each."""
    many = {str(i): i for i in range(1000)}
    body = {"prompt": [None] * 1000, "parts": [{}] * 1000, "names": many, "closed": many}
    assert error_of(body).field == "prompt[0]"
    with pytest.raises(ValueError) as caught:
        Sample.model_validate(body)
    assert caught.value.error_count() < 20  # type: ignore[attr-defined]
